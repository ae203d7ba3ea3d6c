# SPDX-License-Identifier: Apache-2.0
"""Which PTX instructions break the written arithmetic.

A float operation without `.rn` may still be fused by the assembler, `.ftz` flushes subnormals,
`.approx` and `.full` are not correctly rounded, a float atomic adds in the order of arrival, and
`0 - x` is not `-x` for zero.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

FLOATS = {"f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"}
ROUNDED = {"add", "sub", "mul", "fma", "mad", "div", "sqrt", "rcp"}
FUSED = {"fma", "mad"}
INEXACT = {"approx", "full"}
# Instructions that combine values of several threads.
COMBINING = {"atom", "red", "redux", "multimem", "cp"}
# Float and integer spellings of +0 and -0.
ZEROS = {
    "0", "0x0", "0x0000", "0x8000", "0x00000000", "0x80000000", "-2147483648", "0f00000000",
    "0f80000000", "0d0000000000000000", "0d8000000000000000",
}  # fmt: skip
# launch.cuh's probe computes an fma to see whether it is one.
PROBE = "probe_kernel"

_INSTRUCTION = re.compile(r"(?:@!?%\w+\s+)?([a-z]\w*(?:(?:\.|::)\w+)*)\s*(.*)", re.DOTALL)
_FUNCTION = re.compile(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)")
_DIRECTIVE = re.compile(r"check_ptx: (allow|forbid) ([\w.]+)(?: except (\w+))?")


@dataclass(frozen=True)
class Exemptions:
    """What a kernel source declares: opcodes that are meant, and whether fma is forbidden.

    It may be meant all the same in functions that have one of some words in their names.
    """

    allowed: frozenset[str] = frozenset()
    forbid_fma: bool = False
    fma_words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Violation:
    """One instruction that is red."""

    line: int
    function: str
    instruction: str
    message: str


@dataclass
class Function:
    """A function's instructions as (line, opcode, operands)."""

    name: str
    instructions: list[tuple[int, str, list[str]]] = field(default_factory=list)


def exemptions(source: str) -> Exemptions:
    """What the comments of a kernel source declare.

    `check_ptx: allow rsqrt.approx.f32`, `check_ptx: forbid fma` and `check_ptx: forbid fma except
    WORD`, where functions have WORD in their names.
    """
    found = _DIRECTIVE.findall(source)
    allowed = frozenset(opcode for verb, opcode, _ in found if verb == "allow")
    words = [word for verb, opcode, word in found if (verb, opcode) == ("forbid", "fma")]
    return Exemptions(allowed, bool(words), tuple(filter(None, words)))


def check(ptx: str, exempt: Exemptions = Exemptions()) -> list[Violation]:
    """Every red instruction of a PTX text, in order."""
    found = []
    for function in functions(ptx):
        zeros = _zero_registers(function)
        for line, opcode, operands in function.instructions:
            if opcode in exempt.allowed:
                continue
            meant = any(word in function.name for word in (PROBE, *exempt.fma_words))
            fma_forbidden = exempt.forbid_fma and not meant
            for message in _faults(opcode, operands, zeros, fma_forbidden):
                text = f"{opcode} {', '.join(operands)}".strip()
                found.append(Violation(line, function.name, text, message))
    return found


def functions(ptx: str) -> list[Function]:
    """The functions of a PTX text; the first holds what stands outside of any."""
    found = [Function("")]
    text = re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), ptx, flags=re.DOTALL)
    line = 1
    for statement in re.split(r"([;{}])", text):
        start = line + len(statement[: len(statement) - len(statement.lstrip())].split("\n")) - 1
        line += statement.count("\n")
        named = _FUNCTION.search(statement)
        if named:
            found.append(Function(named[1]))
            continue
        # Labels, directives of the debugger and declarations may precede an instruction.
        for offset, part in enumerate(statement.strip().split("\n")):
            part = re.sub(r"^\s*[$\w]+:(?!:)", "", part).strip()
            match = _INSTRUCTION.fullmatch(part)
            if match:
                operands = re.split(r",\s*", match[2].strip()) if match[2].strip() else []
                found[-1].instructions.append((start + offset, match[1], operands))
    return found


def _faults(opcode: str, operands: list[str], zeros: set[str], forbid_fma: bool) -> Iterator[str]:
    base, *suffixes = re.split(r"\.|::", opcode)
    parts = set(suffixes)
    is_float = bool(parts & FLOATS)
    if base in ROUNDED and is_float and "rn" not in parts and not parts & INEXACT:
        yield "has no .rn: the assembler may fuse or round otherwise"
    if "ftz" in parts:
        yield "flushes subnormals"
    if parts & INEXACT:
        yield "is not correctly rounded"
    if base in COMBINING and "add" in parts and (is_float or "tensor" in parts):
        yield "adds floats in the order of arrival"
    if base == "sub" and is_float and operands[1:2] and operands[1] in zeros:
        yield "subtracts from zero: negate by the sign bit"
    if forbid_fma and base in FUSED and is_float:
        yield "is fused where the source forbids it"


def _zero_registers(function: Function) -> set[str]:
    """Constants that are zero, and registers that never hold anything else."""
    writes = Counter(operands[0] for _, _, operands in function.instructions if operands)
    zeros = {
        operands[0]
        for _, opcode, operands in function.instructions
        if opcode.startswith("mov.") and len(operands) == 2 and operands[1] in ZEROS
    }
    return ZEROS | {register for register in zeros if writes[register] == 1}
