# SPDX-License-Identifier: Apache-2.0
"""The attention of diffusers' Qwen-Image with our rotary embedding. Imports diffusers."""

from types import FunctionType
from typing import Any

import torch
from diffusers.models.transformers import transformer_qwenimage as theirs

from rlk import registry
from rlk.errors import ArgumentError

_rope = registry.public_function(registry.find("multi_axis_rope"))


def rotate(
    x: torch.Tensor,
    freqs_cis: torch.Tensor,
    use_real: bool = True,
    use_real_unbind_dim: int = -1,
) -> torch.Tensor:
    """x [B, S, H, D] turned by freqs_cis, complex64 [S, D/2]; stands for apply_rotary_emb_qwen."""
    if use_real:
        raise ArgumentError(
            "apply_rotary_emb_qwen: use_real must be False in a patched model, got True; unpatch it"
        )
    return _rope(x, freqs_cis.real, freqs_cis.imag)


def _with_names(function: Any, names: dict[str, Any]) -> Any:
    """The same code, to which these global names mean something else."""
    # Without __name__: compilers would look names up in the module that it names.
    scope = {name: value for name, value in function.__globals__.items() if name != "__name__"}
    copy = FunctionType(
        function.__code__,
        {**scope, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__, copy.__doc__ = function.__kwdefaults__, function.__doc__
    copy.__annotations__, copy.__module__ = function.__annotations__, __name__
    return copy


_THEIRS = theirs.QwenDoubleStreamAttnProcessor2_0.__call__
_NAME = theirs.apply_rotary_emb_qwen.__name__
# Whether their code is such that the name can be given another meaning.
IS_CALLED = isinstance(_THEIRS, FunctionType) and _NAME in _THEIRS.__code__.co_names


class QwenDoubleStreamAttnProcessor2_0(theirs.QwenDoubleStreamAttnProcessor2_0):
    """Their code, in which only the rotation is ours."""

    __call__ = _with_names(_THEIRS, {_NAME: rotate}) if IS_CALLED else _THEIRS
