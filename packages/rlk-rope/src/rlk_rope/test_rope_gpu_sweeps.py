# SPDX-License-Identifier: Apache-2.0
"""Tokens of large batches on a GPU against the same tokens in any other call."""

import pytest
import torch

from rlk.test_support.on_gpu import BACKENDS, DEVICE, normal
from rlk_rope import multi_axis_rope
from rlk_rope.test_rope_gpu_batches import assert_results, run, tables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # One worker: the batches of this file take a large part of a GPU's memory.
    pytest.mark.xdist_group("rope_sweeps"),
]

# Image tokens of Qwen-Image at three sizes, and text in front.
LENGTHS = (4096, 6032, 6889)
TEXT = 131
PADDING = 24
AROUND_POWERS = [n + side for n in (16, 32, 64, 128, 256, 512, 1024) for side in (-1, 0, 1)]
CHUNKS = (*range(1, 10), *AROUND_POWERS, 2049)
# The first tensor whose elements a 32-bit index cannot count.
BEYOND_32_BITS = 2**31


@pytest.fixture(autouse=True)
def memory():
    """Gives memory back to the workers beside this one."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def packed(length, heads, columns, seed=0, batch=1):
    """The query of a packed projection."""
    return normal(batch, length, 3, heads, columns, seed=seed)[:, :, 0]


def padded(tensor, left):
    """NaN in front of the tokens of each sample, or behind them."""
    nan = torch.full_like(tensor[:, :PADDING], float("nan"))
    return torch.cat((nan, tensor) if left else (tensor, nan), 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_of_an_image_and_its_text_equal_the_whole(length, interleaved, backend):
    x, dy = packed(length + TEXT, 24, 128), packed(length + TEXT, 24, 128, seed=1)
    cos, sin = tables(length + TEXT, 64)
    options = {"interleaved": interleaved, "backend": backend}
    whole = run(x, dy, cos, sin, **options)
    for size in CHUNKS:
        start = length - size // 2 if size < TEXT else 0
        part = slice(start, start + size)
        found = run(x[:, part], dy[:, part], cos[part], sin[part], **options)
        assert_results(found, [t[:, part] for t in whole], f"{size} tokens from {start}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_samples_alone_permuted_and_padded_equal_those_of_a_batch(backend):
    x, dy = packed(1000, 24, 128, batch=4), packed(1000, 24, 128, seed=1, batch=4)
    cos, sin = tables(4, 1000, 64)
    whole = run(x, dy, cos, sin, backend=backend)
    order = torch.tensor([2, 0, 3, 1], device=DEVICE)
    permuted = run(x[order], dy[order], cos[order], sin[order], backend=backend)
    assert_results(permuted, [t[order] for t in whole], "permuted")
    for b in range(4):
        alone = run(x[b : b + 1], dy[b : b + 1], cos[b], sin[b], backend=backend)
        assert_results(alone, [t[b : b + 1] for t in whole], f"sample {b}")
    for left in (True, False):
        found = run(*(padded(t, left) for t in (x, dy, cos, sin)), backend=backend)
        kept = slice(PADDING, None) if left else slice(1000)
        assert_results([t[:, kept] for t in found], whole, f"padded, left={left}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_qwen3_next_heads_of_every_boundary_length_equal_the_longest(backend):
    longest = max(CHUNKS)
    x, dy = normal(2, longest, 16, 256), normal(2, longest, 16, 256, seed=1)
    cos, sin = tables(longest, 32)
    options = {"interleaved": False, "rotary_dim": 64, "backend": backend}
    whole = run(x, dy, cos, sin, **options)
    for size in CHUNKS:
        found = run(x[:, :size], dy[:, :size], cos[:size], sin[:size], **options)
        assert_results(found, [t[:, :size] for t in whole], f"{size} tokens")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("columns_first", [False, True])
def test_more_elements_than_32_bits_count_equal_their_halves(columns_first, backend):
    length = BEYOND_32_BITS // (24 * 128) + 3
    x = normal(1, length, 24, 128)
    if columns_first:
        # Every stride but that of tokens is beyond 32 bits of bytes.
        x = x.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0)
    cos, sin = tables(length, 64)
    (whole, _), half = run(x, x[:, :1, :1, :1].expand_as(x), cos, sin, backend=backend), length // 2
    torch.cuda.empty_cache()
    for part in (slice(0, half), slice(half, length)):
        copy = x[:, part].contiguous()
        y, _ = run(copy, copy[:, :1, :1, :1].expand_as(copy), cos[part], sin[part], backend=backend)
        assert_results([y], [whole[:, part]], str(part))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_more_tokens_than_a_launch_counts_equal_their_halves(batch, backend):
    length = 2**31 // batch + 5
    # Tokens overlap and samples are one: only the result takes its memory.
    x = normal(length + 1).as_strided((batch, length, 1, 2), (0, 1, 1, 1))
    cos, sin = (t.expand(batch, length, 1) for t in tables(batch, 1, 1))
    whole = multi_axis_rope(x, cos, sin, backend=backend)
    for b in range(batch):
        for part in (slice(0, length // 2), slice(length // 2, length)):
            at = slice(b, b + 1), part
            y = multi_axis_rope(x[at], cos[at], sin[at], backend=backend)
            assert_results([y], [whole[at]], str(at))
