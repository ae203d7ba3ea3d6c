# SPDX-License-Identifier: Apache-2.0
"""Samples and tokens of large batches on a GPU against the same ones in any other call."""

import pytest
import torch

from rlk.test_support.on_gpu import BACKENDS, BF16, DEVICE, assert_equal_bits, normal
from rlk_qwenimage.test_layer_norm_gpu_batches import (
    RESULTS,
    SUMS,
    assert_results,
    of_samples,
    of_tokens,
    random_batch,
    results,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # One worker: the batches of this file take a large part of a GPU's memory.
    pytest.mark.xdist_group("layer_norm_sweeps"),
]

# Image tokens of Qwen-Image at three sizes, and sizes around a warp.
IMAGES = (4096, 6032, 6889)
LENGTHS = (31, 32, 33, *IMAGES)
N = 3072
SHORT = 3
MANY_SAMPLES = 2049
AROUND_POWERS = [n + side for n in (16, 32, 64, 128, 256, 512, 1024, 2048) for side in (-1, 0, 1)]
DENSE = [*range(1, 10), *AROUND_POWERS]
CHUNKED = 4096
OF_TOKENS = ("out", "mean", "rstd", "dx")
# The first tensor whose elements a 32-bit index cannot count.
BEYOND_32_BITS = 2**31


@pytest.fixture(autouse=True)
def memory():
    """Gives memory back to the workers beside this one."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def tokens_of(found, which):
    """What these tokens have of the results of a call."""
    return {name: found[name][:, which] for name in OF_TOKENS}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("seed", [0, 127, 2026])
def test_two_samples_equal_each_alone(seed, dtype, length, backend):
    batch = random_batch(2, length, N, dtype=dtype, seed=seed)
    whole = results(batch, backend)
    for sample in (slice(0, 1), slice(1, 2)):
        alone = results(of_samples(batch, sample), backend)
        assert_results(alone, of_samples(whole, sample), f"sample {sample}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, SHORT])
def test_samples_alone_and_in_batches_of_every_boundary_size_equal_the_largest(tokens, backend):
    batch = random_batch(MANY_SAMPLES, tokens, N)
    whole = results(batch, backend)
    for size in DENSE:
        part = slice(MANY_SAMPLES - size, None) if size % 2 else slice(size)
        found = results(of_samples(batch, part), backend)
        assert_results(found, of_samples(whole, part), f"{size} samples")
    for sample in range(0, MANY_SAMPLES, 16):
        part = slice(sample, sample + 1)
        alone = results(of_samples(batch, part), backend)
        assert_results(alone, of_samples(whole, part), f"sample {sample}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_samples_in_five_chunkings_equal_the_whole(backend):
    batch = random_batch(CHUNKED, SHORT, 768, seed=1)
    whole = results(batch, backend)
    for size in (1, 7, 64, 1000, 2048):
        starts = range(0, CHUNKED, size)
        # Calls of few samples are sampled.
        for start in starts if len(starts) <= 64 else list(starts)[:: len(starts) // 64]:
            part = slice(start, start + size)
            found = results(of_samples(batch, part), backend)
            assert_results(found, of_samples(whole, part), f"{size} samples from {start}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", IMAGES)
def test_tokens_in_chunks_equal_those_of_the_image(length, backend):
    batch = random_batch(1, length, N, seed=2)
    whole = results(batch, backend)
    for size in (1, 7, 33, 1000, 4097):
        for start in (0, (length - size) // 2, length - size):
            if start < 0:
                continue
            part = slice(start, start + size)
            found = tokens_of(results(of_tokens(batch, part), backend), slice(None))
            assert_results(found, tokens_of(whole, part), f"{size} tokens from {start}")


def leading_zeros(dout):
    """Half of the tokens, the first ones, without an upstream gradient."""
    half = dout.shape[1] // 2
    return torch.cat([torch.zeros_like(dout[:, :half]), dout[:, half:]], 1)


def scaled_tokens(dout):
    """Tokens apart by up to 80 binades."""
    generator = torch.Generator(DEVICE).manual_seed(5)
    scale = torch.randint(-40, 41, dout.shape[:2], generator=generator, device=DEVICE)
    return (dout.float() * scale[..., None].float().exp2()).to(dout.dtype)


def scaled_elements(dout):
    """Elements apart by up to 160 binades: more than the levels of a block hold."""
    generator = torch.Generator(DEVICE).manual_seed(5)
    scale = torch.randint(-80, 81, dout.shape, generator=generator, device=DEVICE)
    return (dout.float() * scale.float().exp2()).to(dout.dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("data", [None, leading_zeros, scaled_tokens, scaled_elements])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize(("samples", "length"), [(1, 6889), (3, 300), (150, 33)])
def test_token_sums_any_order_of_tokens_has_the_same_bits(samples, length, dtype, data, backend):
    batch = random_batch(samples, length, N, dtype=dtype, seed=3)
    if data is not None:
        batch["dout"] = data(batch["dout"])
    whole = results(batch, backend)
    for seed in range(3):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        order = torch.randperm(length, device=DEVICE, generator=generator)
        found = results(of_tokens(batch, order), backend)
        assert_results(found, whole, "permuted", SUMS)
        assert_results(tokens_of(found, slice(None)), tokens_of(whole, order), "permuted")
    zeros = {n: torch.zeros_like(t[:, :77]) if t.dim() == 3 else t for n, t in batch.items()}
    padded = {
        n: torch.cat([zeros[n], t, zeros[n]], 1) if t.dim() == 3 else t for n, t in batch.items()
    }
    assert_results(results(padded, backend), whole, "zero padded", SUMS)
    alone = results(batch, backend, needs=("scale", "shift"))
    assert_results(alone, whole, "without dx", SUMS)
    for only in ("scale", "shift"):
        assert_results(results(batch, backend, needs=(only,)), whole, only, (f"d{only}",))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("samples", [1, 2, 133])
def test_token_sums_cancelling_tokens_are_6030(samples, backend):
    tokens = 6032
    n = N if samples < 3 else 8
    dout = torch.ones(1, tokens, n, device=DEVICE)
    dout[0, 100], dout[0, 5000] = 2.0**26, -(2.0**26)
    batch = {
        "x": normal(samples, tokens, n, dtype=torch.float32),
        "scale": torch.zeros(samples, n, device=DEVICE),
        "shift": torch.zeros(samples, n, device=DEVICE),
        "dout": dout.expand(samples, tokens, n),
    }
    found = results(batch, backend)["dshift"]
    assert_equal_bits(found, torch.full_like(found, 6030.0), "dshift")


@pytest.mark.parametrize(("samples", "tokens"), [(1, 400), (200, 40)])
def test_token_sums_with_specials_in_every_column_equal_triton(samples, tokens):
    batch = random_batch(samples, tokens, N, dtype=torch.float32, seed=7)
    generator = torch.Generator(DEVICE).manual_seed(1)
    specials = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e38], device=DEVICE)
    for _ in range(2):
        places = torch.randint(0, tokens, (samples, 1, N), generator=generator, device=DEVICE)
        kinds = torch.randint(0, 4, (samples, 1, N), generator=generator, device=DEVICE)
        batch["dout"].scatter_(1, places, specials[kinds])
    a, b = (results(batch, backend, needs=("scale", "shift")) for backend in BACKENDS)
    for name in SUMS:
        for kind in (torch.isnan, torch.isinf, torch.isfinite):
            assert kind(a[name]).any()
        assert torch.equal(a[name].isnan(), b[name].isnan())
        known = ~a[name].isnan()
        assert torch.equal(a[name][known], b[name][known])


@pytest.mark.parametrize(("samples", "length"), [(1, 6889), (2, 4096), (2048, 3), (5, 257)])
def test_backends_have_equal_bits_at_the_sizes_of_the_model(samples, length):
    batch = random_batch(samples, length, N, seed=8)
    a, b = (results(batch, backend) for backend in BACKENDS)
    assert_results(a, b, "cuda and triton", RESULTS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_backward_three_times_has_the_same_bits(backend):
    batch = random_batch(2, 4096, N, seed=9)
    first = results(batch, backend)
    for _ in range(2):
        assert_results(results(batch, backend), first, "again")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens_first", [False, True])
def test_more_elements_than_32_bits_count_equal_their_halves(tokens_first, backend):
    length = BEYOND_32_BITS // (2 * N) + 3
    batch = random_batch(2, length, N, seed=4)
    if tokens_first:
        for name in ("x", "dout"):
            batch[name] = batch[name].transpose(0, 1).contiguous().transpose(0, 1)
    whole = results(batch, backend)
    for sample in (slice(0, 1), slice(1, 2)):
        alone = results(of_samples(batch, sample), backend)
        assert_results(alone, of_samples(whole, sample), f"sample {sample}")
