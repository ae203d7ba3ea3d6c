# SPDX-License-Identifier: Apache-2.0
"""`rlk show`: one operator's declaration, and who would compute it here."""

from typing import Annotated

import torch
import typer
from rich.table import Table

from rlk import dispatch
from rlk.cli import select
from rlk.cli.console import console, table
from rlk.cuda import build, kernels
from rlk.cuda.launch import device_arch
from rlk.errors import RlkError
from rlk.operator import Claim, Operator, Tensor


def show(
    operator: Annotated[str, typer.Argument(metavar="OP", help="Name of the operator.")],
) -> None:
    """Show an operator's declaration and which backend would serve it on this machine."""
    (declared,) = select.named([operator])
    out = console()
    out.print(f"{declared.name} of {declared.package}, bits version {declared.bits_version}")
    out.print(declared.formula)
    claims = [(_guarantee(claim), ", ".join(claim.tensors)) for claim in declared.claims]
    sizes = [
        (work.site, ", ".join(f"{symbol}={size}" for symbol, size in work.sizes.items()))
        for work in declared.workloads
    ]
    for part in (
        _tensors(declared),
        _scalars(declared),
        _reductions(declared),
        table("claims", ("claim", "tensors"), claims),
        table("workloads", ("site", "sizes"), sizes),
        table("backends", ("backend", *select.platforms()), _verdicts(declared)),
        table("where CUDA kernels come from", ("kernels", "place", "here"), _places(declared)),
    ):
        out.print()
        out.print(part)


def _guarantee(claim: Claim) -> str:
    return f"{claim.word} among {', '.join(claim.among)}" if claim.among else claim.word


def _tensors(operator: Operator) -> Table:
    def row(role: str, tensor: Tensor) -> tuple[str, ...]:
        shape = f"[{', '.join(tensor.shape)}]"
        return role, tensor.name, shape, ", ".join(tensor.dtype), tensor.gradient or ""

    groups = (("input", operator.inputs), ("output", operator.outputs), ("saved", operator.saved))
    rows = [row(role, tensor) for role, tensors in groups for tensor in tensors]
    return table("tensors", ("role", "name", "shape", "dtype", "gradient"), rows)


def _scalars(operator: Operator) -> Table:
    rows = []
    for scalar in operator.scalars:
        names = [*scalar.choices, *(f"{a} = {name}" for a, name in scalar.aliases.items())]
        least = f"at least {scalar.minimum}" if scalar.minimum > float("-inf") else ""
        rows.append(
            (
                scalar.name,
                scalar.default,
                "fixed" if scalar.fixed else ", ".join(names) or least,
            )
        )
    return table("scalars", ("name", "default", "values"), rows)


def _reductions(operator: Operator) -> Table:
    rows = [(r.result, r.primitive, r.axis) for r in operator.reductions]
    return table("reductions", ("result", "primitive", "axis"), rows)


def _verdicts(operator: Operator) -> list[tuple[str, ...]]:
    """One row per backend: its name and its verdict on each platform of this machine."""
    columns = []
    for device in select.devices():
        platform = dispatch.platform_of(device)
        try:
            dispatch.require_platform(operator, device, platform)
        except RlkError as error:
            columns.append([str(error)] * len(operator.backends))
        else:
            columns.append([verdict for _, verdict in dispatch.explain(operator, platform)])
    names = [backend.name for backend in operator.backends]
    return list(zip(names, *columns, strict=True))


def _places(operator: Operator) -> list[tuple[str, str, str]]:
    """For all the kernels that its CUDA backend launches, what there is, in the order of use."""
    row = operator.backend(kernels.BACKEND)
    arch = device_arch(torch.cuda.current_device()) if torch.cuda.is_available() else None
    return [
        (kernels.name_of(one), place, verdict)
        for one in (kernels.launched_by(row.load()) if row else ())
        for place, verdict in build.explain(one.source, kernels.name_of(one), one.generated, arch)
    ]
