# SPDX-License-Identifier: Apache-2.0
"""The primitives on a GPU that is not the current one: the bits of the first, which stays current.

Operators have such a test in their suite.
"""

import pytest
import torch

from rlk.compare import assert_same_bits
from rlk.reduce import exact_sum, mma_chain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def sums(tensors, backend):
    """Every function of exact sums."""
    state = exact_sum.new(tensors["rows"].shape[1], tensors["rows"].device)
    for part in tensors["rows"].split(100):
        state = exact_sum.add_rows(state, part, backend=backend)
    state = exact_sum.merge(state, state, backend=backend)
    quotient = exact_sum.round(state, torch.float32, divide_by=7)
    return {
        "state": state,
        "rounded": exact_sum.round(state, torch.bfloat16, backend=backend),
        "quotient": quotient,
    }


def products(tensors, backend):
    """A chain, cut and continued."""
    a, b, bias = (tensors[name] for name in ("a", "b", "bias"))
    whole = mma_chain.product(a, b, bias=bias, backend=backend)
    first = mma_chain.product(a[:, :64], b[:, :64], dtype=torch.float32, backend=backend)
    rest = mma_chain.product(a[:, 64:], b[:, 64:], initial=first, bias=bias, backend=backend)
    assert_same_bits(rest, whole, "continued chain")
    return {"product": whole}


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("compute", [sums, products])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_primitives_on_the_second_gpu_leave_the_first_current(compute, backend, dtype):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    generator = torch.Generator().manual_seed(3)
    shapes = {"rows": (257, 130), "a": (70, 100), "b": (130, 100), "bias": (130,)}
    made = {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}
    first = compute({n: t.to("cuda:0") for n, t in made.items()}, backend)
    with torch.cuda.device(0):
        second = compute({n: t.to("cuda:1") for n, t in made.items()}, backend)
        assert torch.cuda.current_device() == 0
    for name, tensor in second.items():
        assert tensor.device == torch.device("cuda:1")
        if tensor.dtype == torch.int64:
            assert torch.equal(tensor.cpu(), first[name].cpu())
        else:
            assert_same_bits(tensor.cpu(), first[name].cpu(), name)
