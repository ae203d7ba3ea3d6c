# SPDX-License-Identifier: Apache-2.0
"""Which bits are right outside the products: golden's projection, then its norm."""

from ..adaln_mod_projection import golden as projection
from ..layer_norm_modulate import golden as norm
from .composition import Composition

_both = Composition(projection, norm)
forward, backward = _both.forward, _both.backward
