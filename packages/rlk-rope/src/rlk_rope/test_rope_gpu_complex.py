# SPDX-License-Identifier: Apache-2.0
"""On a GPU, rounding="complex_eager" has the bits of PyTorch's eager product of complex64."""

import pytest
import torch

from rlk.compare import assert_same_bits
from rlk.test_support.on_gpu import BACKENDS, DEVICE, normal
from rlk_rope import multi_axis_rope
from rlk_rope.test_rope_gpu_batches import run, tables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EDGES = (0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1.2e-38, 3e-39, 3.4e38, -3.4e38, 65504.0, 1e-7,
         float("inf"), float("-inf"), float("nan"))  # fmt: skip


def in_complex_numbers(x, cos, sin):
    """Adjacent pairs as complex numbers, as diffusers turns them."""
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    angles = torch.complex(cos, sin).unsqueeze(-2)
    return torch.view_as_real(turned * angles).flatten(3).type_as(x)


def eager(x, dy, cos, sin):
    """(y, dx) of complex numbers."""
    x = x.detach().requires_grad_()
    y = in_complex_numbers(x, cos, sin)
    return y.detach(), *torch.autograd.grad(y, x, dy)


def assert_same(found, expected):
    for name, actual, wanted in zip(("y", "dx"), found, expected, strict=True):
        assert_same_bits(actual, wanted.contiguous(), name)


def edges(dtype, heads=4):
    """Every pair of edge values beside each other, against every angle of edge values."""
    values = torch.tensor(EDGES, device=DEVICE)
    pairs = torch.cartesian_prod(values, values)
    x = pairs.flatten().expand(1, len(pairs), heads, 2 * len(pairs)).to(dtype)
    cos, sin = (pairs[:, i, None].expand(len(pairs), len(pairs)).contiguous() for i in (0, 1))
    return x, x.flip(-1), cos, sin


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_inputs_have_the_bits_of_complex_numbers(dtype, backend):
    for shape in ((1, 4096, 24, 128), (2, 77, 3, 8), (3, 5, 1, 2)):
        x, dy = (normal(*shape, dtype=dtype, seed=seed) for seed in (0, 1))
        for cos, sin in (tables(shape[1], shape[3] // 2), tables(*shape[:2], shape[3] // 2)):
            found = run(x, dy, cos, sin, rounding="complex_eager", backend=backend)
            assert_same(found, eager(x, dy, cos, sin))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales_far_apart_have_the_bits_of_complex_numbers(dtype, backend):
    generator = torch.Generator(DEVICE).manual_seed(3)
    shape = (1, 512, 24, 128)
    reach = 12 if dtype == torch.float16 else 60
    scale = torch.randint(-reach, reach + 1, shape, generator=generator, device=DEVICE).float()
    x = (normal(*shape, dtype=torch.float32) * scale.exp2()).to(dtype)
    cos, sin = tables(512, 64)
    found = run(x, x.flip(1), cos, sin, rounding="complex_eager", backend=backend)
    assert_same(found, eager(x, x.flip(1), cos, sin))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_edge_values_have_the_bits_of_complex_numbers(dtype, backend):
    x, dy, cos, sin = edges(dtype)
    found = run(x, dy, cos, sin, rounding="complex_eager", backend=backend)
    assert_same(found, eager(x, dy, cos, sin))


def test_default_rounding_differs_from_complex_numbers_in_last_bits_alone():
    x, (cos, sin) = normal(1, 4096, 24, 128, dtype=torch.float32), tables(4096, 64)
    y, other = multi_axis_rope(x, cos, sin), in_complex_numbers(x, cos, sin)
    share = (y != other).double().mean().item()
    assert 0.15 < share < 0.4
