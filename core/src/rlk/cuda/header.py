# SPDX-License-Identifier: Apache-2.0
"""The C side of a declaration: one struct for each direction, and the launchers' prototypes.

    struct DemoForward   every input, then every output and saved tensor
    struct DemoBackward  output gradients, inputs, saved state, then gradients and exact states

A tensor that is read has a stride for each axis, in elements; results are contiguous, and null
where a gradient is not needed. An exact sum has a state, sums and the form that it ends in, which
are `SumResult` in device_round.cuh; a source that finishes no sums is asked for states alone.
Pointers come first and scalars last: what lies between is the same in all calls that look alike.
"""

import re
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from rlk.cuda.toolchain import ABI
from rlk.errors import BackendError
from rlk.operator import Operator, Scalar, Tensor

# C type -> code of Python's struct module, which aligns as C does.
_CODES = {
    "const void*": "P",
    "void*": "P",
    "long long*": "P",
    "long long": "q",
    "int": "i",
    "float": "f",
}


@dataclass(frozen=True)
class Layout:
    """A struct's name and its fields as (C type, name), the 8-byte ones first."""

    name: str
    fields: tuple[tuple[str, str], ...]

    @cached_property
    def packer(self) -> struct.Struct:
        """What packs values in the order of the fields."""
        # "0P": padded at the end to the alignment of a pointer.
        return struct.Struct("".join(_CODES[kind] for kind, _ in self.fields) + "0P")

    @cached_property
    def packers(self) -> tuple[struct.Struct, struct.Struct, struct.Struct]:
        """What packs the pointers, what lies between, and the scalars behind `device`.

        Their bytes, one after another, are those of `packer`.
        """
        codes = "".join(_CODES[kind] for kind, _ in self.fields)
        first = len(codes) - len(codes.lstrip("P"))
        last = [name for _, name in self.fields].index("device") + 1
        head, middle, tail = codes[:first], codes[first:last], codes[last:]
        # All fields behind the 8-byte ones have 4: only at the end something is padded.
        padding = self.packer.size - sum(map(struct.calcsize, (head, middle, f"={tail}")))
        return struct.Struct(head), struct.Struct(middle), struct.Struct(f"={tail}{padding}x")

    @property
    def text(self) -> str:
        """The declaration in C."""
        lines = [f"    {kind} {name};" for kind, name in self.fields]
        size = f'static_assert(sizeof({self.name}) == {self.packer.size}, "layout of {self.name}");'
        return "\n".join([f"struct {self.name} {{", *lines, "};", size, ""])


def axes(operator: Operator, tensor: Tensor) -> tuple[str, ...]:
    """The axes that a kernel sees: leading ones brought to those of rows."""
    return (*operator.row_axes, *tensor.shape[1:]) if tensor.has_rows else tensor.shape


def symbols(operator: Operator) -> tuple[str, ...]:
    """Every size of a call: those of rows first, then in the order of the inputs."""
    found = dict.fromkeys(axis for tensor in operator.inputs for axis in axes(operator, tensor))
    return tuple(sorted(found, key=lambda axis: axis not in operator.row_axes))


def forward_layout(operator: Operator) -> Layout:
    """The argument of rlk_<operator>_forward."""
    results = [("void*", t.name) for t in operator.outputs + operator.saved]
    return _layout(operator, "Forward", operator.inputs, results)


def backward_layout(operator: Operator) -> Layout:
    """The argument of rlk_<operator>_backward and of rlk_<operator>_backward_workspace."""
    upstream = tuple(_gradient(t) for t in operator.outputs)
    read = upstream + operator.inputs + operator.saved
    results, forms = [], []
    for t in operator.returned_gradients:
        if t.gradient == "parameter":
            results += [("long long*", f"d{t.name}_state"), ("void*", f"d{t.name}_sums")]
            forms.append(("int", f"d{t.name}_form"))
        else:
            results.append(("void*", f"d{t.name}"))
    return _layout(operator, "Backward", read, [*results, ("void*", "workspace")], forms)


def header_name(operator: Operator) -> str:
    """What a source includes."""
    return f"rlk_{operator.name}.h"


def header(operator: Operator) -> str:
    """The text of that header."""
    forward, backward = forward_layout(operator), backward_layout(operator)
    entries = (("forward", forward), ("backward", backward))
    workspace = f"long long rlk_{operator.name}_backward_workspace(const {backward.name}* a);"
    lines = [library_header(operator.name, entries), f"RLK_EXPORT {workspace}", ""]
    return "\n".join([*lines, *_choices(operator)])


def library_header(name: str, entries: Iterable[tuple[str, Layout]]) -> str:
    """The header of a source whose launchers are int rlk_<name>_<entry>(const <Layout>*)."""
    entries = tuple(entries)
    structs = dict.fromkeys(layout for _, layout in entries)
    lines = [
        "// SPDX-License-Identifier: Apache-2.0",
        f"// Generated from the declaration of {name}.",
        "#pragma once",
        f"#define RLK_ABI {ABI}",
        '#include "rlk/cuda/launch.cuh"',
        "",
        *(layout.text for layout in structs),
        *(f"RLK_EXPORT int rlk_{name}_{entry}(const {used.name}* a);" for entry, used in entries),
    ]
    return "\n".join([*lines, ""])


def _layout(
    operator: Operator,
    direction: str,
    read: tuple[Tensor, ...],
    results: list[tuple[str, str]],
    forms: Sequence[tuple[str, str]] = (),
) -> Layout:
    fields = [("const void*", t.name) for t in read]
    fields += [*results, ("void*", "stream")]
    fields += [("long long", f"{t.name}_stride_{axis}") for t in read for axis in axes(operator, t)]
    fields += [("long long", symbol) for symbol in symbols(operator)]
    fields += [("int", f"{t.name}_dtype") for t in operator.inputs]
    fields += [*forms, ("int", "device")]
    fields += [("float" if _is_number(s) else "int", s.name) for s in operator.scalars]
    repeated = [name for name, count in Counter(n for _, n in fields).items() if count > 1]
    if repeated:
        raise BackendError(
            f"{operator.name}: names must be unique in the struct of a call, "
            f"got {', '.join(repeated)} twice"
        )
    name = "".join(word.capitalize() for word in operator.name.split("_")) + direction
    return Layout(name, tuple(fields))


def _gradient(output: Tensor) -> Tensor:
    return Tensor(f"d{output.name}", output.shape, output.dtype)


def _is_number(scalar: Scalar) -> bool:
    return not scalar.choices and not isinstance(scalar.default, bool)


def _choices(operator: Operator) -> list[str]:
    """An enum for each scalar that names its values: ACTIVATION_SILU = 0."""
    lines = []
    for scalar in operator.scalars:
        names = [re.sub(r"\W", "_", f"{scalar.name}_{c}").upper() for c in scalar.choices]
        if names:
            values = ", ".join(f"{name} = {index}" for index, name in enumerate(names))
            lines.append(f"enum {{ {values} }};\n")
    return lines
