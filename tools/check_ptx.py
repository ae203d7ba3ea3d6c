# SPDX-License-Identifier: Apache-2.0
"""Check that compiled kernels hold no instruction that breaks the written arithmetic.

    python tools/check_ptx.py FILE...           PTX files
    python tools/check_ptx.py --cuda [OP...]    compile the operators' CUDA kernels, without a GPU
    python tools/check_ptx.py --triton [OP...]  the same for their Triton kernels

Prints `source: function: line: instruction: what is wrong` and exits 1 if anything is, 2 if
nothing could be checked. The rules are in tools/ptx/rules.py.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ptx import rules
from ptx.rules import Exemptions

from rlk.errors import RlkError
from rlk.operator import Operator

# The oldest generation, and the one where tensor memory instructions begin.
ARCHITECTURES = ("sm_80", "sm_90")
# What is public beside operators.
PRIMITIVES = ("exact_sum", "mma_chain")

# A name for messages, the PTX, and what its source declares.
Text = tuple[str, str, Exemptions]


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    options = _options(arguments)
    try:
        return _judge(options)
    except RlkError as error:
        print(f"check_ptx: {error}", file=sys.stderr)
        return 2


def cuda_texts(names: Sequence[str], archs: Sequence[str]) -> Iterator[Text]:
    """Of every operator's CUDA source, and of the primitives'."""
    from rlk.cuda import kernels, sources

    found = [kernels.of_operator(operator) for operator in _operators(names, "cuda")]
    found += [made for name, made in kernels.of_core().items() if not names or name in names]
    # A variant shares the source of its base.
    compilers = {made.source: made.compile_only for made in found if made is not None}
    wanted = [(source, arch) for source in compilers for arch in archs]
    # Threads: each waits for a compiler of its own.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = pool.map(lambda pair: compilers[pair[0]](pair[1]), wanted)
        for (source, arch), compiled in zip(wanted, made, strict=True):
            # A header of ours declares what it means by itself.
            exempt = rules.exemptions("\n".join(sources.included(source, {}).values()))
            yield f"{source} ({arch})", compiled.ptx, exempt


def triton_texts(names: Sequence[str], archs: Sequence[str]) -> Iterator[Text]:
    """Of every launch that an operator's Triton backend, or a primitive's, makes."""
    from ptx import triton_kernels

    if not triton_kernels.available():
        return
    recorder = triton_kernels.Recorder()
    for operator in _operators(names, "triton"):
        triton_kernels.run_operator(operator)
    runs = (triton_kernels.run_exact_sum, triton_kernels.run_mma_chain)
    for primitive, run in zip(PRIMITIVES, runs, strict=True):
        if not names or primitive in names:
            run()
    pairs = [
        (taken, arch)
        for taken, arch in itertools.product(recorder.launches, archs)
        if int(arch.removeprefix("sm_")) >= taken.oldest
    ]
    for (taken, arch), ptx in zip(pairs, triton_kernels.compile_launches(pairs), strict=True):
        exempt = rules.exemptions(taken.source.read_text())
        yield f"{taken.source}: {taken} ({arch})", ptx, exempt


def _judge(options: argparse.Namespace) -> int:
    texts: Iterable[Text]
    if options.cuda:
        texts = cuda_texts(options.names, options.arch)
    elif options.triton:
        texts = triton_texts(options.names, options.arch)
    else:
        exempt = Exemptions(frozenset(options.allow), options.forbid_fma)
        texts = ((name, Path(name).read_text(), exempt) for name in options.names)
    checked = red = 0
    for name, ptx, exempt in texts:
        kernels = {f.name for f in rules.functions(ptx) if f.instructions}
        checked += len(kernels)
        for violation in rules.check(ptx, exempt):
            red += 1
            print(
                f"{name}: {violation.function}: {violation.line}: {violation.instruction}: "
                f"{violation.message}"
            )
    print(f"{checked} functions checked, {red} red instructions", file=sys.stderr)
    if not checked:
        return 2
    return 1 if red else 0


def _operators(names: Sequence[str], backend: str) -> list[Operator]:
    """The operators with this backend; one that is named must have it."""
    from rlk import registry
    from rlk.cli import select

    named = [name for name in names if name not in PRIMITIVES]
    found = [registry.find(name) for name in named] if names else select.every()
    for operator in found if names else []:
        if operator.backend(backend) is None:
            has = ", ".join(b.name for b in operator.backends)
            raise RlkError(f'{operator.name}: backends must include "{backend}", got {has}')
    return [operator for operator in found if operator.backend(backend)]


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="FILE or OP")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--cuda", action="store_true", help="compile CUDA kernels")
    which.add_argument("--triton", action="store_true", help="compile Triton kernels")
    parser.add_argument("--arch", action="append", help="such as sm_90; repeatable")
    parser.add_argument("--allow", action="append", default=[], help="an opcode that is meant")
    parser.add_argument("--forbid-fma", action="store_true", help="fma is red in the files")
    options = parser.parse_intermixed_args(arguments)
    options.arch = options.arch or list(ARCHITECTURES)
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
