# SPDX-License-Identifier: Apache-2.0
"""Other libraries' functions of the same formula: those of the base."""

from ..rms_norm_residual.prior_art import CONVENTIONS, PEERS

__all__ = ["CONVENTIONS", "PEERS"]
