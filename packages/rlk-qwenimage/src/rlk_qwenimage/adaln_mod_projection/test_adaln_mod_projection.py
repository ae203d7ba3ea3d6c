# SPDX-License-Identifier: Apache-2.0
"""What is special to adaln_mod_projection: the parts of mod, its casts, and its sums."""

import pytest
import torch

from rlk import trace
from rlk.compare import assert_same_bits
from rlk.errors import ArgumentError
from rlk.parts import tensors_in
from rlk_qwenimage import adaln_mod_projection

# The end of a step of 16 samples, and of the next.
FIRST, SECOND, THIRD = 0, 16, 32


def numbered_parts(stream, backend, parts):
    """The modulation whose part p is p everywhere."""
    bias = torch.arange(float(parts)).repeat_interleave(4)
    return adaln_mod_projection(
        torch.zeros(2, 3), torch.zeros(4 * parts, 3), bias, stream, backend=backend
    )


def tensors(*leading, k=24, parts=6, width=5, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((*leading, k), (parts * width, k), (parts * width,))
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("stream", ["img", "txt"])
def test_parts_of_a_block_are_shift_scale_gate_of_each_norm(backend, stream):
    found = numbered_parts(stream, backend, 6)
    named = [
        found.norm1.shift, found.norm1.scale, found.norm1.gate,
        found.norm2.shift, found.norm2.scale, found.norm2.gate,
    ]  # fmt: skip
    for number, part in enumerate(named):
        assert_same_bits(part.contiguous(), torch.full((2, 4), float(number)), str(number))


def test_parts_of_the_end_have_the_scale_first(backend):
    found = numbered_parts("final", backend, 2)
    assert_same_bits(found.scale.contiguous(), torch.zeros(2, 4), "scale")
    assert_same_bits(found.shift.contiguous(), torch.ones(2, 4), "shift")


def test_parts_are_views_of_one_tensor_of_any_leading_axes(backend):
    made = tensors(2, 3)
    with torch.no_grad():
        parts = tensors_in(adaln_mod_projection(*made, "img", backend=backend))
        flat = [made[0].view(6, 24), *made[1:]]
        expected = tensors_in(adaln_mod_projection(*flat, "img", backend=backend))
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    for part, wanted in zip(parts, expected, strict=True):
        assert_same_bits(part.contiguous(), wanted.reshape(2, 3, 5), "part")


@pytest.mark.parametrize("stream", ["img", "final"])
def test_gradients_of_any_parts_are_those_with_zeros_for_the_rest(backend, stream):
    made = tensors(3, width=15 if stream == "final" else 5, parts=2 if stream == "final" else 6)
    parts = tensors_in(adaln_mod_projection(*made, stream, backend=backend))
    upstream = [torch.randn(part.shape) for part in parts]
    for chosen in {(0,), (1,), (0, len(parts) - 1), tuple(range(len(parts)))}:
        some = torch.autograd.grad(
            [parts[i] for i in chosen], made, [upstream[i] for i in chosen], retain_graph=True
        )
        zeroed = [u if i in chosen else torch.zeros_like(u) for i, u in enumerate(upstream)]
        every = torch.autograd.grad(parts, made, zeroed, retain_graph=True)
        for name, a, e in zip(("temb", "weight", "bias"), some, every, strict=True):
            assert_same_bits(a, e, f"d{name} of {chosen}")


def test_gradients_of_all_parts_are_joined_once():
    parts = tensors_in(adaln_mod_projection(*tensors(3), "img"))
    (node,) = {part.grad_fn for part in parts}
    assert "Split" in type(node).__name__


def test_mod_rounds_the_activation_once_to_the_dtype_of_temb(backend, dtype):
    dtype = getattr(torch, dtype)
    temb = torch.linspace(-6, 6, 32, dtype=torch.float64).view(2, 16).to(dtype)
    weight = torch.eye(16, dtype=dtype)
    found = adaln_mod_projection(
        temb, weight, torch.zeros(16, dtype=dtype), "final", backend=backend
    )
    mod = torch.cat(found, -1)
    # A multiple of one, so that mod is act; FP32 to 4 ulp.
    wanted = torch.nn.functional.silu(temb.double()).to(dtype)
    if dtype == torch.float32:
        assert bool(((mod - wanted).abs() <= wanted.abs() * 2.0**-21).all())
    else:
        assert_same_bits(mod, wanted, "mod")


def test_bias_of_float32_beside_narrow_rows_is_added_before_the_rounding(backend):
    # silu(0) = 0: mod is the bias. 1 + 2^-8 is a tie in BF16, and 2^-20 above it is none.
    temb, weight = torch.zeros(1, 2, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.bfloat16)
    bias = torch.tensor([1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-20], requires_grad=True)
    found = adaln_mod_projection(temb, weight, bias, "final", backend=backend)
    mod = torch.cat(found, -1)
    assert mod.tolist() == [[1.0, 1 + 2.0**-7]]
    (dbias,) = torch.autograd.grad(mod, bias, torch.ones_like(mod))
    assert_same_bits(dbias, torch.ones(2), "dbias")


def test_dtemb_of_zero_is_half_of_what_the_product_gives(backend):
    # silu'(0) = 1/2.
    temb, weight = torch.zeros(2, 2, requires_grad=True), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    found = adaln_mod_projection(temb, weight, torch.zeros(2), "final", backend=backend)
    dmod = torch.tensor([[1.0, 1.0], [2.0, -1.0]])
    (dtemb,) = torch.autograd.grad(torch.cat(found, -1), temb, dmod)
    assert_same_bits(dtemb, torch.tensor([[2.0, 3.0], [-0.5, 0.0]]), "dtemb")


@pytest.mark.parametrize(("order", "expected"), [
    ((FIRST, SECOND, THIRD), 0.0),
    ((FIRST, THIRD, SECOND), 1.0),
])  # fmt: skip
def test_dweight_adds_samples_in_ascending_order(backend, order, expected):
    # 2^30, 1 and -2^30 in steps of their own: 1 is lost between the others.
    dmod = torch.zeros(33, 2)
    for place, value in zip(order, (2.0**30, 1.0, -(2.0**30)), strict=True):
        dmod[place] = value
    temb = torch.full((33, 1), 100.0)  # silu(100) = 100
    weight = torch.zeros(2, 1, requires_grad=True)
    found = adaln_mod_projection(temb, weight, torch.zeros(2), "final", backend=backend)
    (dweight,) = torch.autograd.grad(torch.cat(found, -1), weight, dmod)
    assert_same_bits(dweight, torch.full((2, 1), 100 * expected), "dweight")


def test_dbias_cancelling_samples_keep_small_terms(backend):
    # The interpreter is slow: few samples show the loss too.
    samples = 6032 if backend == "golden" else 40
    dmod = torch.ones(samples, 2)
    dmod[[samples // 3, samples // 2]] = torch.tensor([[2.0**26], [-(2.0**26)]])
    bias = torch.zeros(2, requires_grad=True)
    found = adaln_mod_projection(
        torch.zeros(samples, 1), torch.zeros(2, 1), bias, "final", backend=backend
    )
    (dbias,) = torch.autograd.grad(torch.cat(found, -1), bias, dmod)
    assert_same_bits(dbias, torch.full((2,), samples - 2.0), "dbias")


def test_empty_batch_launches_nothing(backend):
    made = tensors(0)
    with trace() as launches:
        parts = tensors_in(adaln_mod_projection(*made, "txt", backend=backend))
        gradients = torch.autograd.grad([part.sum() for part in parts], made)
    assert launches == []
    for gradient, tensor in zip(gradients, made, strict=True):
        assert_same_bits(gradient, torch.zeros_like(tensor), "gradient")


@pytest.mark.parametrize(
    ("stream", "rows", "divisor"), [("img", 14, 6), ("txt", 3, 6), ("final", 7, 2)]
)
def test_weight_that_cannot_be_cut_is_refused_with_the_divisor(stream, rows, divisor):
    with pytest.raises(ArgumentError) as caught:
        adaln_mod_projection(torch.ones(2, 3), torch.ones(rows, 3), torch.ones(rows), stream)
    assert str(caught.value) == (
        f"adaln_mod_projection: weight must be [N, K] with N divisible by {divisor} for stream "
        f"{stream!r}, got [{rows}, 3]"
    )


@pytest.mark.parametrize("stream", ["image", None, ["img"]])
def test_stream_of_another_name_is_refused(stream):
    with pytest.raises(ArgumentError, match="stream must be one of img, txt, final, got"):
        adaln_mod_projection(torch.ones(2, 3), torch.ones(6, 3), torch.ones(6), stream)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(6)}, r"weight must be \[N, K\] with K=3, got \[6\]"),
        ({"weight": torch.ones(6, 4)}, r"weight must be \[N, K\] with K=3, got \[6, 4\]"),
        ({"bias": torch.ones(5)}, r"bias must be \[N\] with N=6, got \[5\]"),
        ({"weight": torch.ones(6, 3).half()}, "weight must be float32 like temb, got float16"),
        ({"bias": torch.ones(6).half()}, "bias must be float32 like temb, got float16"),
    ],
)
def test_tensor_that_does_not_fit_is_refused_by_name(change, message):
    made = {"temb": torch.ones(2, 3), "weight": torch.ones(6, 3), "bias": torch.ones(6), **change}
    with pytest.raises(ArgumentError, match=f"adaln_mod_projection: {message}"):
        adaln_mod_projection(**made, stream="img")
