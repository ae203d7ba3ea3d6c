# SPDX-License-Identifier: Apache-2.0
"""What tests of large batches share: values made on a GPU, and a comparison that stays there."""

from collections.abc import Callable

import torch
from torch.autograd import DeviceType

from rlk.compare import assert_same_bits

BACKENDS = ("cuda", "triton")
DEVICE = "cuda"
BF16 = torch.bfloat16
# Elements among which the CPU looks for the first that differs.
SEARCHED = 1 << 28
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def draws(dtype: torch.dtype = BF16, seed: int = 0) -> Callable[..., torch.Tensor]:
    """What makes normal values of a shape on the GPU, others each time."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE, dtype=dtype)

    return normal


def normal(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    """Normal values made on the GPU, the same each time."""
    return draws(dtype, seed)(*shape)


def launches_of(run: Callable[[], object]) -> list[str]:
    """What the GPU does in a call, by name: kernels, copies and memory that is set."""
    run()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    return [e.name for e in profile.events() if e.device_type == DeviceType.CUDA]


def assert_equal_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Assert equal bits, those of NaN too, where the tensors lie; a CPU says where they differ."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, expected {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, expected {expected.dtype}"
    integer = _INTEGERS[actual.element_size()]
    bits = [t.contiguous().view(integer) for t in (actual, expected)]
    if not torch.equal(*bits):
        if actual.numel() <= SEARCHED:
            assert_same_bits(actual, expected, what)
        raise AssertionError(f"{what}: other bits, or NaN of another pattern")
