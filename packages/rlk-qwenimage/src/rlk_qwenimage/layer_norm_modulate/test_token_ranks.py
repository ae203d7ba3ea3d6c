# SPDX-License-Identifier: Apache-2.0
"""One sample's tokens on three ranks: every gradient has the bytes of one rank, on all of them."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from rlk import interpreter
from rlk.compare import assert_same_bits, same_bits
from rlk.errors import ArgumentError, BackendError, GradientError
from rlk.reduce import exact_sum
from rlk.torch_suite.ranks import Ranks
from rlk_qwenimage import adaln_mod_projection, final_adaln_out, layer_norm_modulate
from rlk_qwenimage.layer_norm_modulate import token_ranks

pytestmark = pytest.mark.xdist_group("token_ranks")

INTERPRETED = interpreter.enable_without_gpu()
RANKS, SAMPLES, TOKENS, WIDTH = 3, 2, 13, 37
# Where the tokens of ranks end: evenly, unevenly, one rank without any, one with all.
CUTS = ((4, 8), (1, 12), (5, 5), (0, 13))
NAMES = ("out", "dx", "dscale", "dshift")


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    ranks = Ranks("cpu", RANKS)
    yield ranks
    ranks.close()


def batch(dtype=torch.float32, device="cpu"):
    """x, scale, shift and the gradient of out, whose sums over tokens depend on their order."""
    generator = torch.Generator().manual_seed(11)
    x, dout = (torch.randn(SAMPLES, TOKENS, WIDTH, generator=generator) for _ in range(2))
    scale, shift = (torch.randn(SAMPLES, WIDTH, generator=generator) for _ in range(2))
    dout[:, ::3] *= 2.0**20
    dout[:, 2::3] *= -(2.0**20)
    return [t.to(device, dtype) for t in (x, scale, shift, dout)]


def run(call, x, scale, shift, dout, wanted=(True, True, True)):
    """out, and the gradients that are wanted, by name."""
    leaves = [t.detach().requires_grad_(w) for t, w in zip((x, scale, shift), wanted, strict=True)]
    out = call(*leaves)
    out.backward(dout)
    found = dict(zip(NAMES, (out.detach(), *(t.grad for t in leaves)), strict=True))
    return {name: t for name, t in found.items() if t is not None}


def over_ranks(x, scale, shift, **options):
    return layer_norm_modulate(x, scale, shift, token_group=dist.group.WORLD, **options)


def mine(cut, *tensors):
    """This rank's tokens."""
    ends = (0, *cut, TOKENS)
    rank = dist.get_rank()
    return [t[:, ends[rank] : ends[rank + 1]] for t in tensors]


def expected(cut, made, wanted=(True, True, True)):
    """Of one rank, with this rank's tokens where a result has tokens."""
    whole = run(layer_norm_modulate, *made, wanted)
    return {n: mine(cut, t)[0] if n in ("out", "dx") else t for n, t in whole.items()}


def differing(found, wanted):
    assert found.keys() == wanted.keys()
    return {name for name in wanted if not same_bits(found[name], wanted[name])}


def compare_cuts(device, dtype, cuts=CUTS):
    x, scale, shift, dout = made = batch(dtype, device)
    for cut in cuts:
        rows, gradient = mine(cut, x, dout)
        found = run(over_ranks, rows, scale, shift, gradient)
        assert differing(found, expected(cut, made)) == set(), cut


def compare_wanted(device):
    x, scale, shift, dout = made = batch()
    rows, gradient = mine(CUTS[1], x, dout)
    for wanted in ((True, False, False), (False, True, False), (False, False, True)):
        found = run(over_ranks, rows, scale, shift, gradient, wanted)
        assert differing(found, expected(CUTS[1], made, wanted)) == set(), wanted


def compare_compiled(device, compiler):
    x, scale, shift, dout = made = batch()
    rows, gradient = mine(CUTS[2], x, dout)
    call = torch.compile(over_ranks, fullgraph=True, backend=compiler)
    found = run(call, rows, scale, shift, gradient)
    assert differing(found, expected(CUTS[2], made)) == set()


def compare_projection(device):
    """Behind the projection: its gradients are whole on every rank, and equal."""
    x, _, _, dout = batch()
    generator = torch.Generator().manual_seed(12)
    sizes = ((SAMPLES, 16), (2 * WIDTH, 16), (2 * WIDTH,))
    given = [torch.randn(*size, generator=generator) for size in sizes]

    def gradients(call, rows, gradient):
        leaves = [t.clone().requires_grad_() for t in given]
        call(rows, *leaves).backward(gradient)
        return dict(zip(("dtemb", "dweight", "dbias"), (t.grad for t in leaves), strict=True))

    def call(rows, *projection):
        return over_ranks(rows, *adaln_mod_projection(*projection, "final"))

    found = gradients(call, *mine(CUTS[1], x, dout))
    assert differing(found, gradients(final_adaln_out, x, dout)) == set()


def plant(device, fault):
    x, scale, shift, dout = made = batch()
    rows, gradient = mine(CUTS[1], x, dout)
    kept = token_ranks.added
    token_ranks.added = FAULTS[fault]
    try:
        found = run(over_ranks, rows, scale, shift, gradient)
    finally:
        token_ranks.added = kept
    assert differing(found, expected(CUTS[1], made)) == {"dscale", "dshift"}


def rounded(states):
    rows = exact_sum.round(states, torch.float32)[None]
    return exact_sum.add_rows(exact_sum.new(rows.shape[1]), rows)


def added(states):
    dist.all_reduce(states)
    return states


# What stands in place of the sum over ranks.
FAULTS = {
    "rounded before the sum": lambda states, group: added(rounded(states)),
    "no sum": lambda states, group: states,
    "one rank's part is missing": lambda states, group: added(states * (dist.get_rank() != 1)),
    "one rank's part twice": lambda states, group: added(states * (1 + (dist.get_rank() == 2))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_on_three_ranks_have_the_bytes_of_one(three, dtype):
    three.run(compare_cuts, dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_on_two_gpus_have_the_bytes_of_one(dtype):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    ranks = Ranks("cuda")
    try:
        ranks.run(compare_cuts, dtype, ((4,), (0,), (12,)))
    finally:
        ranks.close()


def test_tokens_on_three_ranks_sum_only_what_is_wanted(three):
    three.run(compare_wanted)


def test_tokens_on_three_ranks_compiled_have_the_bytes_of_one(three):
    three.run(compare_compiled, "aot_eager")


def test_projection_behind_tokens_on_three_ranks_has_whole_gradients(three):
    three.run(compare_projection)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_between_ranks_changes_the_token_sums_alone(three, fault):
    three.run(plant, fault)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A group of this process."""
    path = tmp_path_factory.mktemp("alone") / "store"
    dist.init_process_group("gloo", init_method=path.as_uri(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_tokens_on_one_rank_have_the_bytes_of_the_operator(alone):
    made = batch()
    found = run(over_ranks, *made)
    assert differing(found, run(layer_norm_modulate, *made)) == set()


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5)], ids=str)
def test_tokens_of_no_sample_or_none_at_all_give_zeros(alone, shape):
    x, modulation = torch.ones(shape), torch.ones(shape[0], shape[2])
    found = run(over_ranks, x, modulation, modulation, x)
    assert_same_bits(found["dscale"], torch.zeros_like(modulation), "dscale")
    assert_same_bits(found["dshift"], torch.zeros_like(modulation), "dshift")


def test_tokens_over_ranks_second_differentiation_is_refused(alone):
    x, scale, shift, _ = batch()
    leaf = scale.requires_grad_()
    (gradient,) = torch.autograd.grad(over_ranks(x, leaf, shift).sum(), leaf, create_graph=True)
    with pytest.raises(GradientError, match="layer_norm_modulate: the derivative must be of first"):
        gradient.sum().backward()


def test_tokens_over_ranks_of_another_backend_are_refused(alone):
    x, scale, shift, _ = batch()
    states = torch.ops.rlk.layer_norm_modulate_token_states
    with pytest.raises(
        BackendError, match="backend must be one of 'auto', 'triton', 'golden', got 'cu"
    ):
        states(x, x, x[..., 0], x[..., 0], True, True, "cuda")
    with pytest.raises(ArgumentError, match=r"layer_norm_modulate: scale must be .* got \[2, 36\]"):
        over_ranks(x, scale[:, 1:], shift)


def test_token_group_that_is_none_is_refused():
    x, scale, shift, _ = batch()
    with pytest.raises(ArgumentError) as caught:
        layer_norm_modulate(x, scale, shift, token_group="ranks")
    assert str(caught.value) == (
        "layer_norm_modulate: token_group must be a torch.distributed.ProcessGroup, got str"
    )


def test_token_states_pass_opcheck():
    x, _, _, dout = batch()
    mean, rstd = (t.clone() for t in x[..., :2].unbind(-1))
    for needs in ((True, True), (False, True)):
        torch.library.opcheck(
            torch.ops.rlk.layer_norm_modulate_token_states.default,
            (dout, x, mean, rstd, *needs, "golden"),
        )


@pytest.mark.skipif(not INTERPRETED, reason="needs triton's interpreter")
@pytest.mark.parametrize("tokens", [3, 130])
def test_token_states_of_triton_equal_those_of_golden(tokens):
    generator = torch.Generator().manual_seed(tokens)
    x, dout = (torch.randn(2, tokens, 40, generator=generator).bfloat16() for _ in range(2))
    _, mean, rstd = torch.ops.rlk.layer_norm_modulate(x, x[:, 0], x[:, 0], 1e-6, "golden")
    states = torch.ops.rlk.layer_norm_modulate_token_states
    for needs in ((True, True), (True, False)):
        found, wanted = (
            states(dout, x, mean, rstd, *needs, b).view(13, -1) for b in ("triton", "golden")
        )
        assert torch.equal(found, wanted)
        assert (wanted != 0).any()
