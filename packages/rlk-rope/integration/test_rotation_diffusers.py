# SPDX-License-Identifier: Apache-2.0
"""On a GPU our two roundings beside the rotation of diffusers, as the operator's page states it."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlk.compare import assert_same_bits
from rlk_rope import multi_axis_rope

compare = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("compare_qwen_image.py"))))

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
TABLES = compare.image_tables()
INPUTS = compare.inputs(*TABLES)
# Of the page, for normal inputs: elements of y in which `separate` differs, at most.
DIFFERING = {torch.float32: 0.18, torch.bfloat16: 2e-5, torch.float16: 1e-4}


def ours(x, rounding, backend=None):
    """(y, dx), x taken as its own upstream gradient."""
    x = x.to(DEVICE)
    leaf = torch.zeros_like(x, requires_grad=True)
    tables = [table.to(DEVICE) for table in TABLES]
    options = {"rounding": rounding, "backend": backend}
    (dx,) = torch.autograd.grad(multi_axis_rope(leaf, *tables, **options), leaf, x)
    return multi_axis_rope(x, *tables, **options).cpu(), dx.cpu()


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", compare.DTYPES, ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_complex_eager_has_every_bit_of_diffusers(name, dtype, backend):
    x = INPUTS[name].to(dtype)
    y, dx = ours(x, "complex_eager", backend)
    assert_same_bits(y, compare.diffusers_rotation(x, *TABLES, DEVICE), "y")
    assert_same_bits(dx, compare.diffusers_gradient(x, *TABLES, DEVICE), "dx")


@pytest.mark.parametrize("dtype", compare.DTYPES, ids=str)
def test_separate_differs_from_diffusers_by_an_ulp_in_the_elements_that_the_page_states(
    dtype, record_property
):
    x = INPUTS["normal"].to(dtype)
    found = compare.diffusers_rotation(x, *TABLES, DEVICE)
    differs, distance, at_pair, unequal = compare.difference(found, ours(x, "separate")[0], x)
    print(f"{dtype}: {differs:.4%} differ, by {distance} ulp, {at_pair:.2f} ulp at the pair")
    record_property("differing", differs)
    record_property("ulp_of_pair", at_pair)
    assert DIFFERING[dtype] / 4 < differs <= DIFFERING[dtype]
    assert at_pair <= 1
    assert dtype == torch.float32 or distance == 1
    assert unequal == 0
