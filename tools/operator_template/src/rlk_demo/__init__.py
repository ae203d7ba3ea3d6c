# SPDX-License-Identifier: Apache-2.0
"""The operator demo."""

from rlk_demo.demo import demo

__all__ = ["demo"]
__version__ = "0.1.0"
