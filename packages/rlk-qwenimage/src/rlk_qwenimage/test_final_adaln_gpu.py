# SPDX-License-Identifier: Apache-2.0
"""The modulated last norm at the sizes of Qwen-Image on a GPU."""

from functools import partial

import pytest
import torch

from rlk import contract
from rlk.bench.timing import peak_bytes
from rlk.between import observe
from rlk.exact_grad import new_carrier
from rlk.gates.casts import cast_to
from rlk.launch import trace
from rlk.test_support.on_gpu import DEVICE, assert_equal_bits, launches_of
from rlk_qwenimage import adaln_mod_projection, final_adaln_out, layer_norm_modulate
from rlk_qwenimage.final_adaln_out import prior_art
from rlk_qwenimage.final_adaln_out.operator import OPERATOR
from rlk_qwenimage.test_adaln_gpu_batches import BACKENDS, DTYPES, require_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # One worker: the batches of this file take a large part of a GPU's memory.
    pytest.mark.xdist_group("adaln_sweeps"),
]

H = K = 3072
# Around a warp of tokens, and the tokens of images of 1024x1024, 1664x928 and 1328x1328.
TOKENS = (1, 31, 32, 33, 4096, 6032, 6889)
NAMES = ("x", "temb", "weight", "bias")
OF_SAMPLES = ("out", "dx", "dtemb")
RESULTS = (*OF_SAMPLES, "dweight", "dbias")

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(autouse=True)
def memory():
    """Gives memory back to the workers beside this one."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def tensors(samples, tokens, dtype, seed=0):
    """x, temb, weight, bias and dout."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shapes = ((samples, tokens, H), (samples, K), (2 * H, K), (2 * H,), (samples, tokens, H))
    made = [torch.randn(s, generator=generator, device=DEVICE) for s in shapes]
    made[2] *= K**-0.5
    return [t.to(getattr(torch, dtype)) for t in made]


def results(function, made, backend, wanted=NAMES):
    """out and the wanted gradients by name."""
    *inputs, dout = made
    leaves = {
        name: t.detach().requires_grad_(name in wanted)
        for name, t in zip(NAMES, inputs, strict=True)
    }
    out = function(*leaves.values(), backend=backend)
    gradients = torch.autograd.grad(out, [leaves[name] for name in wanted], dout)
    return {"out": out.detach(), **{f"d{n}": g for n, g in zip(wanted, gradients, strict=True)}}


def composed(x, temb, weight, bias, *, backend):
    modulation = adaln_mod_projection(temb, weight, bias, "final", backend=backend)
    return layer_norm_modulate(x, *modulation, backend=backend)


def sample(made, rows):
    """The same call on some samples."""
    x, temb, weight, bias, dout = made
    return [x[rows], temb[rows], weight, bias, dout[rows]]


@every_backend
@every_dtype
@pytest.mark.parametrize("tokens", TOKENS)
def test_bits_are_those_of_the_two_operators_and_of_single_samples(tokens, dtype, backend):
    made = tensors(2, tokens, dtype)
    whole = results(final_adaln_out, made, backend)
    require_all(results(composed, made, backend), whole, RESULTS, "the two operators")
    for place in range(2):
        rows = slice(place, place + 1)
        single = results(final_adaln_out, sample(made, rows), backend)
        expected = {name: whole[name][rows] for name in OF_SAMPLES}
        require_all(single, expected, OF_SAMPLES, f"sample {place}")


@every_dtype
@pytest.mark.parametrize("tokens", [1, 33, 4096])
def test_backends_have_the_same_bits(tokens, dtype):
    made = tensors(3, tokens, dtype, seed=1)
    first, second = (results(final_adaln_out, made, backend) for backend in BACKENDS)
    require_all(second, first, RESULTS, f"{tokens} tokens")


@every_dtype
@pytest.mark.parametrize(("samples", "tokens"), [(2, 4096), (257, 3)])
def test_no_weight_gradient_is_beyond_the_contract(samples, tokens, dtype, record_property):
    made = tensors(samples, tokens, dtype, seed=2)
    bound = contract.load().accuracy("gradient_accuracy", OPERATOR.category, dtype)

    def beyond(actual, expected):
        error = (actual.double() - expected).abs()
        return int((~(error <= bound.atol + bound.rtol * expected.abs())).sum())

    leaves = [t.double() for t in made[:4]]
    leaves[2].requires_grad_()
    out = OPERATOR.oracle(*leaves, eps=1e-6, cast=cast_to(made[0].dtype))[0]
    (expected,) = torch.autograd.grad(out, leaves[2], made[4].double())
    call = prior_art.in_torch({"eps": 1e-6})
    theirs = results(lambda *t, backend: call(*t), made, None, ("weight",))["dweight"]
    record_property("beyond, PyTorch", beyond(theirs, expected))
    for backend in BACKENDS:
        with observe() as shown:
            found = results(final_adaln_out, made, backend, ("weight",))["dweight"]
        record_property(f"beyond, {backend}", beyond(found, expected))
        # A rounding of dmod next to a tie is nobody's to promise: what follows is judged given it.
        act = torch.ops.rlk.adaln_mod_projection(*made[1:4], backend)[1]
        assert beyond(found, shown["dmod"].double().T @ act.double()) == 0


@every_backend
@pytest.mark.parametrize(("dtype", "expected"), [("float32", 6030.0), ("bfloat16", 6016.0)])
def test_cancelling_tokens_keep_small_terms_in_shift_and_bias(dtype, expected, backend):
    made = tensors(1, 6032, dtype)
    made[4].fill_(1.0)
    made[4][0, 17], made[4][0, 4099] = 2.0**26, -(2.0**26)
    found = results(final_adaln_out, made, backend, ("bias",))
    assert set(found["dbias"][H:].tolist()) == {expected}
    shift = torch.zeros_like(made[1]).requires_grad_()
    out = layer_norm_modulate(made[0], torch.zeros_like(made[1]), shift, backend=backend)
    (dshift,) = torch.autograd.grad(out, shift, made[4])
    assert set(dshift.flatten().tolist()) == {expected}


@every_backend
def test_repeats_and_permuted_tokens_change_no_bit_of_the_sums(backend):
    made = tensors(2, 4096, "bfloat16")
    first = results(final_adaln_out, made, backend)
    for _ in range(2):
        require_all(results(final_adaln_out, made, backend), first, RESULTS, "a repeat")
    order = torch.randperm(4096, device=DEVICE)
    moved = [made[0][:, order], *made[1:4], made[4][:, order]]
    found = results(final_adaln_out, moved, backend)
    require_all(found, first, ("dtemb", "dweight", "dbias"), "permuted tokens")
    assert_equal_bits(found["out"], first["out"][:, order], "permuted out")


@every_backend
@every_dtype
@pytest.mark.parametrize(("samples", "tokens"), [(2, 4096), (1, 6889), (2048, 3)])
def test_peak_memory_is_that_of_the_tensors_and_the_saved_state(samples, tokens, dtype, backend):
    made = tensors(samples, tokens, dtype)
    x, temb, *_ = leaves = [t.requires_grad_() for t in made[:4]]

    def step():
        return torch.autograd.grad(final_adaln_out(*leaves, backend=backend), leaves, made[4])

    # What others left in the cache may be handed out in larger pieces than asked for.
    torch.cuda.empty_cache()
    peak, found = peak_bytes(step)
    out, gradients = x.nbytes, sum(t.nbytes for t in found)
    mod = dmod = samples * 2 * H * x.element_size()
    act, mean, rstd = temb.nbytes, 4 * samples * tokens, 4 * samples * tokens
    owned = out + gradients + act + mod + mean + rstd + dmod
    print(f"{backend} {samples}x{tokens} {dtype}: {peak} bytes, {peak / owned - 1:+.2%}")
    assert peak <= 1.02 * owned


@every_backend
def test_one_token_has_a_storage_of_its_own(backend):
    made = tensors(1, 1, "bfloat16")
    found = results(final_adaln_out, made, backend)
    given = {t.untyped_storage().data_ptr() for t in made}
    assert not given & {t.untyped_storage().data_ptr() for t in found.values()}


@every_backend
def test_trace_lists_kernels_of_the_projection_and_of_the_norm(backend):
    with trace() as launches:
        results(final_adaln_out, tensors(1, 33, "bfloat16"), backend)
    assert {launch.operator for launch in launches} == {"final_adaln_out"}
    assert {launch.backend for launch in launches} == {backend}
    kernels = " ".join(launch.kernel for launch in launches)
    assert "activation" in kernels
    assert "layer_norm_modulate" in kernels


@pytest.mark.parametrize(("samples", "copies"), [(1, 0), (2, 1)])
def test_backward_copies_the_gradient_of_mod_only_of_several_samples(samples, copies):
    made = tensors(samples, 4096, "bfloat16")
    leaves = [t.requires_grad_() for t in made[:4]]
    carrier = new_carrier(leaves[3])
    for carriers in ((), (carrier,)):
        out = final_adaln_out(*leaves, backend="cuda", bias_sum=next(iter(carriers), None))
        wanted = [*leaves, *carriers]
        found = launches_of(partial(torch.autograd.grad, out, wanted, made[4], retain_graph=True))
        # Kernels of torch: copies, fills, conversions.
        assert len([name for name in found if "at::native" in name]) == copies, found
