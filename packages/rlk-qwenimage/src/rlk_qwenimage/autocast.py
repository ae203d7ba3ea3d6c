# SPDX-License-Identifier: Apache-2.0
"""What autocast does to a linear layer, for modules that stand in for one.

Operators themselves take the dtypes that they are given.
"""

import torch


def as_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in the dtype of autocast, where it is on."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor.to(dtype) for tensor in tensors)
