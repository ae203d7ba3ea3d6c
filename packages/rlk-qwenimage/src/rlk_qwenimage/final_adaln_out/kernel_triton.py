# SPDX-License-Identifier: Apache-2.0
"""final_adaln_out in Triton: the kernels of the projection, then those of the norm."""

from ..adaln_mod_projection import kernel_triton as projection
from ..layer_norm_modulate import kernel_triton as norm
from .composition import Composition

_both = Composition(projection, norm)
forward, backward = _both.forward, _both.backward
