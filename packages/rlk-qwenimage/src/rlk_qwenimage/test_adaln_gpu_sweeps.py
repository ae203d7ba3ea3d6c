# SPDX-License-Identifier: Apache-2.0
"""Modulations at the widths of Qwen-Image on a GPU: a sample in any batch, and sums of samples.

Over both kernel backends each, the checks of three streams come to: 90 of accuracy (streams, two
dtypes, three seeds, five tensors), 90 of the workload of 4096 samples (five chunkings, three
tensors of samples), 126 of repeats and padding (seven a stream, dtype and seed); every one of 2049
singletons against up to 39 batches for each stream and dtype; and cancellation in every dtype.
"""

from itertools import product

import pytest
import torch

from rlk import contract, use_backend
from rlk.bench.timing import peak_bytes
from rlk.gates.casts import cast_to
from rlk.gates.layout import transposed
from rlk.test_support.layouts import shifted, spread
from rlk.test_support.on_gpu import DEVICE, assert_equal_bits
from rlk_qwenimage import ModulationLinear
from rlk_qwenimage.adaln_mod_projection.operator import OPERATOR
from rlk_qwenimage.test_adaln_gpu_batches import (
    BACKENDS,
    DTYPES,
    OF_PARAMETERS,
    OF_SAMPLES,
    RESULTS,
    SEEDS,
    STREAMS,
    Batch,
    K,
    batch,
    require_all,
    run,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # One worker: the batches of this file take a large part of a GPU's memory.
    pytest.mark.xdist_group("adaln_sweeps"),
]

BATCHES = (1, 2, 3, 64, 257, 2048)
AROUND_POWERS = [n + d for n in (16, 32, 64, 128, 256, 512, 1024, 2048) for d in (-1, 0, 1)]
SIZES = sorted({*BATCHES, *range(1, 10), *AROUND_POWERS})
MOST = max(SIZES)
# Of 4096 samples, as (sizes of the calls in turn).
WORKLOAD = 4096
CHUNKINGS = ((2048,), (1024,), (1000,), (257,), (1, 4095))
APPENDED = (1, 5, 16, 33, 257)
# 19: samples of a batch that ends inside a step of 16.
PADDED = 19

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_stream = pytest.mark.parametrize("stream", STREAMS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_seed = pytest.mark.parametrize("seed", SEEDS)


@pytest.fixture(autouse=True)
def memory():
    """Gives memory back to the workers beside this one."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def joined(parts):
    """The results of samples of several calls, in order."""
    return {name: torch.cat([part[name] for part in parts]) for name in OF_SAMPLES}


@every_backend
@every_dtype
@every_stream
def test_singletons_have_the_bits_of_every_batch(stream, dtype, backend):
    made = batch(stream, dtype, MOST)
    single = joined([run(made.part(slice(i, i + 1)), backend, ("temb",)) for i in range(MOST)])
    for size in SIZES:
        found = run(made.part(slice(0, size)), backend, ("temb",))
        first = {name: tensor[:size] for name, tensor in single.items()}
        require_all(found, first, OF_SAMPLES, f"{size} samples")


@every_backend
@every_dtype
@every_stream
def test_workload_in_chunks_has_the_bits_of_the_whole(stream, dtype, backend):
    made = batch(stream, dtype, WORKLOAD, seed=1)
    whole = run(made, backend, ("temb",))
    for sizes in CHUNKINGS:
        parts, start, turn = [], 0, 0
        while start < WORKLOAD:
            end = min(start + sizes[turn % len(sizes)], WORKLOAD)
            parts.append(run(made.part(slice(start, end)), backend, ("temb",)))
            start, turn = end, turn + 1
        require_all(joined(parts), whole, OF_SAMPLES, f"chunks of {sizes}")


@every_backend
@every_seed
@every_dtype
@every_stream
def test_repeats_and_appended_samples_without_gradient_change_no_bit(stream, dtype, seed, backend):
    made = batch(stream, dtype, PADDED, seed)
    first = run(made, backend)
    for repeat in range(2):
        require_all(run(made, backend), first, RESULTS, f"repeat {repeat}")
    for count in APPENDED:
        more = torch.arange(count, device=DEVICE) % PADDED
        longer = Batch(
            torch.cat([made.temb, made.temb[more] * -0.5]),
            made.weight,
            made.bias,
            torch.cat([made.dmod, torch.zeros_like(made.dmod[more])]),
        )
        found = run(longer, backend)
        assert_equal_bits(found["dtemb"][:PADDED], first["dtemb"], f"dtemb before {count}")
        require_all(found, first, OF_PARAMETERS, f"{count} appended")


@every_seed
@every_dtype
@every_stream
def test_no_element_is_beyond_the_contract_of_fp64_and_fp32(stream, dtype, seed):
    made = batch(stream, dtype, 64, seed)
    found = {backend: run(made, backend) for backend in BACKENDS}
    for precision, device in ((torch.float64, DEVICE), (torch.float32, "cpu")):
        expected = by_oracle(made, precision, device)
        for backend, name in product(BACKENDS, RESULTS):
            wanted = expected[name].to(DEVICE)
            beyond = count_beyond(found[backend][name], wanted, name, dtype)
            assert beyond == 0, f"{name} on {backend} against {precision}"
            # What a bound this wide would let through.
            assert count_beyond(torch.zeros_like(wanted), wanted, name, dtype) > 0, name


@every_dtype
@every_stream
def test_no_weight_gradient_of_many_samples_is_beyond_the_contract(stream, dtype, record_property):
    made = batch(stream, dtype, 257, seed=3)
    wanted = by_oracle(made, torch.float64, DEVICE)["dweight"]
    weight = made.weight.clone().requires_grad_()
    mod = torch.nn.functional.linear(torch.nn.functional.silu(made.temb), weight, made.bias)
    (theirs,) = torch.autograd.grad(mod, weight, made.dmod)
    record_property("beyond, PyTorch", count_beyond(theirs, wanted, "dweight", dtype))
    for backend in BACKENDS:
        found = run(made, backend, ("weight",))["dweight"]
        assert count_beyond(found, wanted, "dweight", dtype) == 0, backend


def count_beyond(actual, wanted, name, dtype):
    """Elements beyond the contract's ceiling, NaN among them."""
    judgment = "gradient_accuracy" if name.startswith("d") else "forward_accuracy"
    bound = contract.load().accuracy(judgment, OPERATOR.category, dtype)
    error = (actual.double() - wanted.double()).abs()
    return int((~(error <= bound.atol + bound.rtol * wanted.double().abs())).sum())


def by_oracle(made, precision, device):
    """The results of the oracle in a dtype on a device, with the declared cast."""
    tensors = (made.temb, made.weight, made.bias)
    leaves = [t.to(device, precision).requires_grad_() for t in tensors]
    mod, act = OPERATOR.oracle(*leaves, cast=cast_to(made.temb.dtype))
    gradients = torch.autograd.grad(mod, leaves, made.dmod.to(device, precision))
    named = dict(zip(("dtemb", "dweight", "dbias"), gradients, strict=True))
    return {"mod": mod.detach(), "act": act.detach(), **named}


@every_dtype
@every_stream
@pytest.mark.parametrize("samples", [1, 3, 16, 64, 257, 2048])
def test_backends_have_the_same_bits(samples, stream, dtype):
    made = batch(stream, dtype, samples, seed=2)
    first, second = (run(made, backend) for backend in BACKENDS)
    require_all(second, first, RESULTS, f"{samples} samples")


@every_backend
@pytest.mark.parametrize(("dtype", "expected"), [("float32", 6030.0), ("bfloat16", 6016.0)])
def test_dbias_cancelling_samples_keep_small_terms(dtype, expected, backend):
    # 6030 is no BF16 number; the nearest one is 6016.
    kind = getattr(torch, dtype)
    dmod = torch.ones(6032, 6, device=DEVICE, dtype=kind)
    dmod[17], dmod[4099] = 2.0**26, -(2.0**26)
    zeros = torch.zeros(6032, 8, device=DEVICE, dtype=kind)
    made = Batch(zeros, zeros[:6].contiguous(), zeros[0, :6].contiguous(), dmod)
    found = run(made, backend)["dbias"]
    assert found.tolist() == [expected] * 6
    narrow = run(Batch(zeros, made.weight, made.bias.float(), dmod), backend)["dbias"]
    assert narrow.tolist() == [6030.0] * 6


@every_backend
@every_dtype
def test_dweight_cancelling_samples_stay_within_the_bound_of_a_chain(dtype, backend):
    generator = torch.Generator(DEVICE).manual_seed(4)
    temb = torch.randn(6032, 8, generator=generator, device=DEVICE).to(getattr(torch, dtype))
    temb[4099] = temb[17]
    dmod = torch.ones_like(temb[:, :6])
    dmod[17], dmod[4099] = 2.0**26, -(2.0**26)
    weight = torch.zeros_like(temb[:6])
    found = run(Batch(temb, weight, weight[:, 0].contiguous(), dmod), backend)
    act, actual = found["act"].double(), found["dweight"].double()
    wanted, size = dmod.double().T @ act, dmod.double().abs().T @ act.abs()
    # Each of the 6032 products is cut to the accumulator's last bit, which is cut with each 16 of
    # them; FP32 is split before that.
    chain = (6032 + 4) * 2.0**-22 * size
    half_ulp, error = torch.finfo(temb.dtype).eps / 2, (actual - wanted).abs()
    assert bool((error <= chain + half_ulp * (wanted.abs() + chain)).all())
    # Unlike dbias it is not exact.
    assert bool((error > half_ulp * wanted.abs()).any())


@every_backend
@every_dtype
@pytest.mark.parametrize("stream", ["img", "final"])
def test_peak_memory_is_that_of_the_tensors_and_the_saved_state(stream, dtype, backend):
    made = batch(stream, dtype, 2048)
    temb = made.temb.requires_grad_()
    layer = ModulationLinear(K, STREAMS[stream], device=DEVICE, dtype=temb.dtype)
    leaves = [temb, *layer.parameters()]

    def step():
        with use_backend(backend):
            return torch.autograd.grad(layer(temb), leaves, made.dmod)

    # What others left in the cache may be handed out in larger pieces than asked for.
    torch.cuda.empty_cache()
    peak, found = peak_bytes(step)
    mod, act, gradients = made.dmod.nbytes, temb.nbytes, sum(t.nbytes for t in found)
    owned = mod + act + gradients
    print(f"{backend} {stream} {dtype}: {peak} bytes, {peak / owned - 1:+.2%}")
    assert peak <= 1.02 * owned


@every_backend
@every_dtype
def test_any_layout_has_the_bits_of_contiguous_tensors(dtype, backend):
    made = batch("final", dtype, 37)
    expected = run(made, backend)
    shapes = {"temb": made.temb, "weight": made.weight, "bias": made.bias, "dmod": made.dmod}
    for name, change in product(shapes, (shifted, spread, transposed)):
        moved = Batch(**{**shapes, name: change(shapes[name])})
        require_all(run(moved, backend), expected, RESULTS, f"{change.__name__} {name}")


@every_backend
def test_widths_of_the_model_are_those_of_the_declaration(backend):
    sizes = {(w.sizes["K"], w.sizes["N"]) for w in OPERATOR.workloads}
    assert sizes == {(K, columns) for columns in STREAMS.values()}
    assert OPERATOR.backend(backend) is not None
