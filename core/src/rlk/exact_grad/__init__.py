# SPDX-License-Identifier: Apache-2.0
"""Parameter gradients that do not depend on how a batch was cut into micro-batches and ranks."""

from .accumulator import ExactGradAccumulator
from .carrier import new_carrier, state_of
from .parameters import AccumulationReport, ParameterGradient

__all__ = [
    "AccumulationReport",
    "ExactGradAccumulator",
    "ParameterGradient",
    "new_carrier",
    "state_of",
]
