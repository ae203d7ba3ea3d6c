# SPDX-License-Identifier: Apache-2.0
"""FP32 functions with written arithmetic: the same bits on every backend."""
