# SPDX-License-Identifier: Apache-2.0
"""The standard backend rows of a declaration, and what each needs from the machine."""

import importlib.util
from collections.abc import Callable
from functools import partial
from types import ModuleType

from rlk.operator import Backend


def golden(load: Callable[[], ModuleType]) -> Backend:
    """PyTorch FP32 in the written order: serves the CPU, other devices only by request."""
    return Backend("golden", load, platforms=("cpu",), on_request=("nvidia",))


def triton(load: Callable[[], ModuleType], *, interpreted: bool = True) -> Backend:
    """Triton kernels: serve NVIDIA GPUs; on the CPU only by request, in the interpreter.

    Args:
        load: imports the module.
        interpreted: whether the interpreter has all that the kernels use.
    """
    also = ("cpu",) if interpreted else ()
    return Backend("triton", load, platforms=("nvidia",), on_request=also, missing=_triton_missing)


def cuda(load: Callable[[], ModuleType]) -> Backend:
    """CUDA kernels, of the wheel or compiled by nvcc: serve NVIDIA GPUs.

    Args:
        load: gives `rlk.cuda.launch.module(...)`, or a module that names in `launches` the kernels
            that it launches.
    """
    return Backend("cuda", load, platforms=("nvidia",), missing=partial(_cuda_missing, load))


def _cuda_missing(load: Callable[[], ModuleType], platform: str) -> str | None:
    import torch

    if torch.version.cuda is None:
        return "it needs a torch built for CUDA, got one without"
    from rlk.cuda import kernels

    return kernels.missing(load())


def _triton_missing(platform: str) -> str | None:
    from rlk import interpreter

    if importlib.util.find_spec("triton") is None:
        return "it needs the package triton, which is not installed"
    if platform == "cpu" and not interpreter.is_enabled():
        return "on the CPU it runs in Triton's interpreter, which TRITON_INTERPRET=1 turns on"
    return None
