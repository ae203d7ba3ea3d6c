# SPDX-License-Identifier: Apache-2.0
"""Every CUDA source of an installation, and what compiles and loads it."""

from typing import Any, TypeAlias

import torch

from rlk import registry
from rlk.cuda import build
from rlk.cuda.launch import KernelModule, device_arch
from rlk.cuda.steps import Steps
from rlk.errors import BackendError
from rlk.operator import Operator

BACKEND = "cuda"
# What is compiled from one source.
Kernels: TypeAlias = KernelModule | Steps


def of_operator(operator: Operator) -> Kernels | None:
    """The kernels of an operator, or None if it has none of its own.

    Raises:
        BackendError: its backend is not made by rlk.cuda.
    """
    row = operator.backend(BACKEND)
    module: Any = row.load() if row else None
    found: Kernels | None = getattr(module, "steps", module)
    if found is not None and not isinstance(found, KernelModule | Steps):
        raise BackendError(
            f'{operator.name}: backend "{BACKEND}" must come from rlk.cuda, got {module}'
        )
    return found


def missing(module: Any) -> str | None:
    """In one clause, why a backend module has no binary for the present GPU, or None.

    Args:
        module: kernels, or a Python module whose `launches` are the kernels that it launches.
    """
    if not torch.cuda.is_available():
        return None
    arch = device_arch(torch.cuda.current_device())
    lacks = (build.missing(k.source, name_of(k), k.generated, arch) for k in launched_by(module))
    return next((lack for lack in lacks if lack is not None), None)


def launched_by(module: Any) -> list[Kernels]:
    """The kernels that a backend module launches: itself, or those that it names."""
    found = getattr(module, "launches", (module,))
    return [one for one in found if isinstance(one, KernelModule | Steps)]


def of_core() -> dict[str, Kernels]:
    """The kernels of core's primitives, by name."""
    from rlk.reduce.exact_sum import kernel_cuda as exact_sum
    from rlk.reduce.mma_chain import kernel_cuda as mma_chain

    return {steps.name: steps for steps in (exact_sum.steps, mma_chain.steps)}


def of_package(package: str) -> list[Kernels]:
    """Each source of a package once; a variant of an operator shares the source of its base."""
    if package == "rlk":
        return list(of_core().values())
    found = map(of_operator, registry.declared_in(package))
    return list({kernels.source: kernels for kernels in found if kernels is not None}.values())


def name_of(kernels: Kernels) -> str:
    """The name that its launchers begin with."""
    return kernels.name if isinstance(kernels, Steps) else kernels.operator.name
