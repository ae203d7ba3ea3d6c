# SPDX-License-Identifier: Apache-2.0
"""final_adaln_out in CUDA: the kernels of the projection, then those of the norm."""

from ..adaln_mod_projection import kernel_cuda as projection
from ..layer_norm_modulate.operator import OPERATOR as NORM
from .composition import Composition

# Its module is made of its declaration and its source.
_norm = next(row for row in NORM.backends if row.name == "cuda").load()
_both = Composition(projection, _norm)
forward, backward = _both.forward, _both.backward
# As the projection does.
finishes_sums = True
# No source of its own to build.
steps = None
launches = (*projection.launches, _norm)
