# SPDX-License-Identifier: Apache-2.0
"""Adaptive layer normalisation of Qwen-Image: same bits for a sample in any batch."""

__all__: list[str] = []
__version__ = "0.1.0"
