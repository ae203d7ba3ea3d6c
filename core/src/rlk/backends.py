# SPDX-License-Identifier: Apache-2.0
"""The standard backend rows of a declaration, and what each needs from the machine."""

import importlib.util
from collections.abc import Callable
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
    """CUDA kernels, compiled by nvcc at first use or by `rlk build`: serve NVIDIA GPUs."""
    return Backend("cuda", load, platforms=("nvidia",), missing=_cuda_missing)


def _cuda_missing(platform: str) -> str | None:
    import torch

    from rlk.cuda import build

    if torch.version.cuda is None:
        return "it needs a torch built for CUDA, got one without"
    return build.missing()


def _triton_missing(platform: str) -> str | None:
    from rlk import interpreter

    if importlib.util.find_spec("triton") is None:
        return "it needs the package triton, which is not installed"
    if platform == "cpu" and not interpreter.is_enabled():
        return "on the CPU it runs in Triton's interpreter, which TRITON_INTERPRET=1 turns on"
    return None
