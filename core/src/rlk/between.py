# SPDX-License-Identifier: Apache-2.0
"""Values between the steps of an operator, shown to gates that judge later steps given them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Process-global as open traces are: backward runs in threads of autograd.
_open: list[dict[str, torch.Tensor]] = []
_lock = threading.Lock()


@contextmanager
def observe() -> Iterator[dict[str, torch.Tensor]]:
    """Collect copies of the values that operators show while the block runs, the first of a name.

    Returns:
        A mapping from names to tensors that grows while the block runs.
    """
    found: dict[str, torch.Tensor] = {}
    with _lock:
        _open.append(found)
    try:
        yield found
    finally:
        with _lock:
            _open[:] = [other for other in _open if other is not found]


def show(name: str, value: torch.Tensor) -> None:
    """Show a value that no output holds, such as a gradient that is rounded between two steps."""
    if not _open:
        return
    with _lock:
        for found in _open:
            if name not in found:
                found[name] = value.detach().clone()
