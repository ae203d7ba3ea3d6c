# SPDX-License-Identifier: Apache-2.0
"""Our tables are those of diffusers, in every bit of every element."""

import inspect

import diffusers
import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage import (
    QwenEmbedRope,
    QwenImageTransformer2DModel,
)

from rlk.compare import assert_same_bits
from rlk_rope.positions import QWEN_IMAGE_AXES, RopeTables, qwen_image_positions, rope_tables

# The oldest release with these classes and the newest tested; CI installs both.
DIFFUSERS = ("0.35.0", "0.42.1")
# Rows of their tables: positions -4096 .. 4095, of which they silently cut what is beyond.
ROWS = 4096

ONE_IMAGE = [
    (1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 2, 2), (1, 3, 3), (1, 1, 97), (1, 13, 1), (1, 7, 11),
    (1, 11, 7), (1, 16, 16), (1, 31, 33), (1, 32, 32), (1, 33, 31), (1, 47, 83), (1, 64, 64),
    (1, 83, 83), (1, 104, 58), (1, 58, 104), (1, 90, 68), (1, 127, 129), (1, 128, 8),
    (1, 1023, 3), (1, 3, 2049), (2, 5, 6), (3, 9, 4), (5, 1, 1), (16, 2, 3), (17, 3, 2),
    (1, ROWS, 1), (1, 1, ROWS - 1), (ROWS, 1, 1),
]  # fmt: skip
SEVERAL_IMAGES = [
    [(1, 1, 1)] * 2,
    [(1, 1, 1)] * 9,
    [(1, 64, 64), (1, 64, 64)],
    [(1, 64, 64), (1, 83, 47)],
    [(1, 3, 5), (1, 50, 2), (1, 2, 61)],
    [(1, 2, 61), (1, 50, 2), (1, 3, 5)],
    [(2, 5, 4), (3, 4, 5), (1, 7, 7)],
    [(4, 3, 3), (4, 3, 3)],
    [(1, 104, 58), (1, 32, 32), (1, 17, 19), (1, 1, 1)],
    [(1, 4, 4), (1, 4, 4), (2, 4, 4), (1, 4, 4)],
    [(1, 1, 7), (1, 7, 1), (1, 1, 1)],
    [(1, 41, 43)] * 5,
]
GRIDS = [[image] for image in ONE_IMAGE] + SEVERAL_IMAGES


@pytest.fixture(scope="module")
def theirs():
    """Their tables (centred or not) as a function of the images of one sample."""
    embeds = {
        centred: QwenEmbedRope(10000, list(QWEN_IMAGE_AXES), scale_rope=centred)
        for centred in (True, False)
    }
    return lambda images, text, centred: built(embeds[centred], images, text)


def built(embed, images, text_length):
    """(cos, sin) of [text, images] that an embedding of theirs gives for one sample."""
    # 0.35 caches an image by its height and width alone, whatever its number of frames.
    getattr(embed, "rope_cache", {}).clear()
    newer = "max_txt_seq_len" in inspect.signature(embed.forward).parameters
    length = {"max_txt_seq_len": text_length} if newer else {"txt_seq_lens": [text_length]}
    image, text = embed([images], device=torch.device("cpu"), **length)
    assert text.shape[0] == text_length
    assert image.dtype == text.dtype == torch.complex64
    joint = torch.cat([text, image])
    return joint.real, joint.imag


def assert_same_tables(ours, expected, what):
    for name, table, right in zip(("cos", "sin"), ours, expected, strict=True):
        assert_same_bits(table, right, f"{name} of {what}")


def test_installed_diffusers_is_one_of_those_that_ci_installs():
    assert diffusers.__version__ in DIFFUSERS
    assert len(GRIDS) >= 40


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("images", GRIDS, ids=str)
def test_tables_of_one_sample_are_theirs_bit_for_bit(theirs, images, centred):
    start = max(side // 2 if centred else side for image in images for side in image[1:])
    for text in sorted({min(text, ROWS - start) for text in (0, 1, 77, ROWS)}):
        ours = rope_tables(qwen_image_positions([images], text, centred=centred)[0])
        assert_same_tables(ours, theirs(images, text, centred), f"{images}, text {text}")


def test_tables_of_the_largest_centred_grid_are_theirs_bit_for_bit(theirs):
    images = [(1, 2 * ROWS, 1)]
    ours = rope_tables(qwen_image_positions([images], 0)[0])
    assert_same_tables(ours, theirs(images, 0, True), images)


def test_tables_of_a_mixed_batch_are_theirs_of_each_sample_alone(theirs):
    small = [images for images in GRIDS if sum(f * h * w for f, h, w in images) < ROWS // 2]
    assert len(small) > 20
    lengths = [number % 7 for number in range(len(small))]
    cos, sin = rope_tables(qwen_image_positions(small, lengths))
    for sample, images in enumerate(small):
        expected = theirs(images, max(lengths), True)
        size = len(expected[0])
        ours = cos[sample, :size], sin[sample, :size]
        assert_same_tables(ours, expected, images)
        assert torch.equal(cos[sample, size:], torch.ones_like(cos[sample, size:]))
        assert torch.equal(sin[sample, size:], torch.zeros_like(sin[sample, size:]))


def test_tables_of_text_beyond_their_limit_follow_their_formula():
    images, text = [(1, 83, 83)], 3 * ROWS
    embed = QwenEmbedRope(10000, list(QWEN_IMAGE_AXES), scale_rope=True)
    index = torch.arange(83 // 2, 83 // 2 + text)
    by_axis = [embed.rope_params(index, channels, 10000) for channels in QWEN_IMAGE_AXES]
    expected = torch.cat(by_axis, dim=1)
    cos, sin = rope_tables(qwen_image_positions([images], text)[0])
    assert_same_tables((cos[:text], sin[:text]), (expected.real, expected.imag), "text")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_in_a_model_cast_to_low_precision_are_still_theirs(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = QwenImageTransformer2DModel(
            num_layers=1, attention_head_dim=128, num_attention_heads=1, joint_attention_dim=8
        )
    finally:
        torch.set_default_dtype(before)
    images, text = [(1, 9, 6), (1, 4, 4)], 12
    model.tables = RopeTables(*rope_tables(qwen_image_positions([images], text)[0]))
    keys = set(model.state_dict())
    for change in (lambda m: m.to(torch.bfloat16), lambda m: m.half()):
        change(model)
        assert next(model.parameters()).dtype != torch.float32
        assert_same_tables(model.tables(), built(model.pos_embed, images, text), dtype)
    assert set(model.state_dict()) == keys
    assert not any(key.startswith("tables") for key in keys)
