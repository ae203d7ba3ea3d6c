# SPDX-License-Identifier: Apache-2.0
"""How kernels read one side of a product: along which axis, and whether TMA can."""

from dataclasses import dataclass

import torch

# 16 bytes: the alignment of an address and of strides that TMA takes.
ALIGNMENT = 16
# 2^31: coordinates of TMA are 32 bits; less 1024: tiles at an edge begin beyond it, those of a
# cluster by more than one tile.
MOST = (1 << 31) - 1024


@dataclass(frozen=True)
class Operand:
    """One side of a product [rows, K]."""

    tensor: torch.Tensor
    k_major: bool
    leading: int  # stride of the axis that is not contiguous
    fits: bool  # sizes and strides are such that TMA reads it from an aligned address

    @property
    def tma(self) -> bool:
        """Whether TMA reads it where it is."""
        return self.fits and self.tensor.data_ptr() % ALIGNMENT == 0


def operand(tensor: torch.Tensor) -> Operand:
    """How kernels read a tensor [rows, K]."""
    rows, k = tensor.shape
    row_stride, k_stride = tensor.stride()
    per = ALIGNMENT // tensor.element_size()
    k_major = k_stride == 1 and (k > 1 or row_stride != 1)
    inner, outer = (k, rows) if k_major else (rows, k)
    leading = row_stride if k_major else k_stride
    contiguous = k_major or row_stride == 1 or rows == 1
    if outer == 1:
        # No second one to step to: any stride that TMA takes.
        leading = -(-inner // per) * per
    fits = contiguous and leading >= inner > 0 and leading % per == 0 and max(rows, k) < MOST
    return Operand(tensor, k_major, leading, fits and outer > 0)
