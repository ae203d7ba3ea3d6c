# SPDX-License-Identifier: Apache-2.0
"""GPU operators whose bits do not depend on the company a row keeps."""

from rlk.dispatch import use_backend
from rlk.launch import trace
from rlk.reduce import exact_sum
from rlk.registry import operators

__all__ = ["exact_sum", "operators", "trace", "use_backend"]
__version__ = "0.1.0"
