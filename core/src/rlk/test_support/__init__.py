# SPDX-License-Identifier: Apache-2.0
"""A tiny operator and a way to install packages, for core's own tests; no part of the wheel."""

from rlk.test_support.packages import install
from rlk.test_support.tiny import small_integers, tiny_backend, tiny_operator

__all__ = ["install", "small_integers", "tiny_backend", "tiny_operator"]
