# SPDX-License-Identifier: Apache-2.0
"""What tests of core and of packages share, a file for each concern; not in the wheel."""

from rlk.test_support.packages import install
from rlk.test_support.tiny import small_integers, tiny_backend, tiny_operator

__all__ = ["install", "small_integers", "tiny_backend", "tiny_operator"]
