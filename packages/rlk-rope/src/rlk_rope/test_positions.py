# SPDX-License-Identifier: Apache-2.0
"""Positions written out by hand, tables against FP64, and the holder under every cast."""

import copy
import io
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from rlk.compare import assert_same_bits
from rlk.contract import load
from rlk.errors import ArgumentError
from rlk_rope.positions import QWEN_IMAGE_AXES, RopeTables, qwen_image_positions, rope_tables


def assert_right(table, oracle):
    bound = load().tolerance("forward_accuracy", "elementwise", torch.float32)
    torch.testing.assert_close(table.double(), oracle, atol=bound.atol, rtol=bound.rtol)


def listed(*arguments, **options):
    return qwen_image_positions(*arguments, **options).tolist()


def test_positions_one_centred_image_are_text_first_then_rows_of_columns():
    assert listed([[(1, 4, 3)]], 2) == [
        [
            [2, 2, 2], [3, 3, 3],
            [0, -2, -2], [0, -2, -1], [0, -2, 0],
            [0, -1, -2], [0, -1, -1], [0, -1, 0],
            [0, 0, -2], [0, 0, -1], [0, 0, 0],
            [0, 1, -2], [0, 1, -1], [0, 1, 0],
        ]
    ]  # fmt: skip


def test_positions_not_centred_count_from_zero_and_text_from_the_whole_side():
    assert listed([[(1, 2, 3)]], 1, centred=False) == [
        [[3, 3, 3], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 1, 2]]
    ]


def test_positions_frame_index_counts_images_and_frames():
    first, second = [[0, -1, -1], [1, -1, -1]], [[1, -1, -1], [1, -1, 0]]
    assert listed([[(2, 1, 1), (1, 1, 2)]], 0) == [first + second]


@pytest.mark.parametrize(
    ("images", "centred", "start"),
    [
        ([(1, 1, 1)], True, 0),
        ([(1, 1, 1)], False, 1),
        ([(1, 9, 4)], True, 4),
        ([(1, 4, 11)], True, 5),
        ([(1, 4, 11)], False, 11),
        ([(1, 2, 2), (1, 3, 8), (1, 6, 1)], True, 4),
        ([(1, 2, 2), (1, 3, 8), (1, 6, 1)], False, 8),
        ([(50, 2, 2)], True, 1),
        ([], True, 0),
    ],
)
def test_text_start_is_the_largest_half_or_whole_side_of_any_image(images, centred, start):
    tokens = math.prod(images[0]) if len(images) == 1 else None
    positions = qwen_image_positions([images], 3, centred=centred)[0]
    assert positions[:3].tolist() == [[start + t] * 3 for t in range(3)]
    if tokens:
        assert len(positions) == 3 + tokens


@pytest.mark.parametrize("text_length", [0, 1, 5000, [7, 0, 4]])
def test_positions_samples_of_one_size_share_memory_for_text_of_any_length(text_length):
    positions = qwen_image_positions([[(1, 3, 2)]] * 3, text_length)
    length = max(text_length) if isinstance(text_length, list) else text_length
    assert positions.shape == (3, length + 6, 3)
    assert positions.dtype == torch.int64
    assert positions.stride(0) == 0
    assert torch.equal(positions[0], qwen_image_positions([(1, 3, 2)], length)[0])


def test_positions_samples_of_mixed_sizes_are_padded_with_zero_at_their_end():
    images = [[(1, 2, 2)], [(1, 5, 3), (1, 2, 1)], []]
    positions = qwen_image_positions(images, [1, 4, 0])
    assert positions.shape == (3, 4 + 17, 3)
    for sample, row in zip(images, positions, strict=True):
        alone = qwen_image_positions([sample], 4)[0]
        assert torch.equal(row[: len(alone)], alone)
        assert not row[len(alone) :].any()
    cos, sin = rope_tables(positions)
    assert torch.equal(cos[0, 8:], torch.ones(13, 64))
    assert torch.equal(sin[0, 8:], torch.zeros(13, 64))


def test_positions_image_without_its_list_is_the_only_one_of_its_sample():
    assert listed([(1, 3, 2), [1, 2, 2]], 1) == listed([[(1, 3, 2)], [(1, 2, 2)]], 1)


def test_positions_no_samples_give_an_empty_batch():
    assert qwen_image_positions([], 5).shape == (0, 5, 3)
    assert qwen_image_positions([], []).shape == (0, 0, 3)
    cos, sin = rope_tables(qwen_image_positions([], 5))
    assert cos.shape == sin.shape == (0, 5, 64)


LISTED = "a list of (frames, height, width), each at least 1"


@pytest.mark.parametrize(
    ("grids", "text_length", "message"),
    [
        (1, 1, "grids must be a list with one entry a sample, got 1"),
        ([[(1, 2, 2)], 7], 1, f"grids[1] must be {LISTED}, got 7"),
        ([[(1, 2)]], 1, f"grids[0] must be {LISTED}, got [(1, 2)]"),
        ([[(1, 0, 2)]], 1, f"grids[0] must be {LISTED}, got [(1, 0, 2)]"),
        ([[(1, 2.0, 2)]], 1, f"grids[0] must be {LISTED}, got [(1, 2.0, 2)]"),
        ([[(True, 2, 2)]], 1, f"grids[0] must be {LISTED}, got [(True, 2, 2)]"),
        ([[(1, 2, 2), 3]], 1, f"grids[0] must be {LISTED}, got [(1, 2, 2), 3]"),
        ([], -1, "text_length must be an integer of at least 0, or one a sample, got -1"),
        ([], 1.0, "text_length must be an integer of at least 0, or one a sample, got 1.0"),
        (
            [[(1, 2, 2)]] * 2,
            [3],
            "text_length must be one number, or one for each of 2 samples, got 1 numbers",
        ),
    ],
)
def test_positions_wrong_argument_is_named_with_its_value(grids, text_length, message):
    with pytest.raises(ArgumentError) as caught:
        qwen_image_positions(grids, text_length)
    assert str(caught.value) == f"qwen_image_positions: {message}"


def test_tables_are_the_cosine_and_sine_of_the_fp32_angle():
    positions = qwen_image_positions([[(2, 7, 5), (1, 1, 9)]], 40)[0]
    cos, sin = rope_tables(positions)
    expected = []
    for axis, channels in enumerate(QWEN_IMAGE_AXES):
        power = torch.tensor([1e4]) ** (torch.arange(0, channels, 2).float() / channels)
        expected.append((positions[:, axis, None].float() * (1.0 / power)).double())
    angles = torch.cat(expected, -1)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (len(positions), 64)
    assert_right(cos, angles.cos())
    assert_right(sin, angles.sin())


def test_tables_frequencies_fall_from_one_and_each_axis_has_its_columns():
    cos, sin = rope_tables(torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1]]))
    used = [range(8), range(8, 36), range(36, 64)]
    for row, columns in enumerate(used):
        angles = torch.atan2(sin[row].double(), cos[row].double())
        inside = angles[list(columns)]
        assert inside[0].float() == 1
        assert (inside[1:] < inside[:-1]).all()
        assert angles.count_nonzero() == len(columns)


def test_tables_other_axes_and_theta_serve_a_single_position_axis():
    cos, sin = rope_tables(torch.arange(6, dtype=torch.int32)[:, None], (4,), 100)
    angles = torch.tensor(
        [[p, p * float(torch.tensor(0.1))] for p in range(6)], dtype=torch.float64
    )
    assert torch.equal(torch.round(cos * 2**22), torch.round(angles.cos().float() * 2**22))
    assert torch.equal(torch.round(sin * 2**22), torch.round(angles.sin().float() * 2**22))


def test_tables_of_a_row_ignore_the_other_rows():
    positions = qwen_image_positions([[(1, 13, 9), (1, 4, 4)]], 31)[0]
    whole = rope_tables(positions)
    order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(7))
    for rows in (order, order[:1], order[:17]):
        for table, all_rows in zip(rope_tables(positions[rows]), whole, strict=True):
            assert_same_bits(table, all_rows[rows])


def test_tables_negative_position_flips_the_sine_alone():
    positions = torch.arange(1, 4096)[:, None].expand(-1, 3)
    cos, sin = rope_tables(positions)
    other_cos, other_sin = rope_tables(-positions)
    assert_same_bits(other_cos, cos)
    assert_same_bits(other_sin, -sin)


def test_tables_samples_of_one_size_share_memory_and_bits():
    positions = qwen_image_positions([[(1, 6, 5)]] * 4, 3)
    alone = rope_tables(positions[0])
    for table, row in zip(rope_tables(positions), alone, strict=True):
        assert (table.shape, table.stride(0)) == ((4, 33, 64), 0)
        assert_same_bits(table[2], row)


def test_tables_default_device_and_dtype_change_no_bit():
    expected = rope_tables(qwen_image_positions([[(1, 6, 5)]], 3))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found = rope_tables(qwen_image_positions([[(1, 6, 5)]], 3))
    finally:
        torch.set_default_dtype(before)
    for table, right in zip(found, expected, strict=True):
        assert table.device.type == "cpu"
        assert_same_bits(table, right)


def test_tables_in_a_compiled_function_keep_the_bits_of_eager():
    positions = qwen_image_positions([[(1, 6, 5)]], 3)
    expected = rope_tables(positions)
    compiled = torch.compile(lambda p: rope_tables(p), backend="eager")
    for table, right in zip(compiled(positions), expected, strict=True):
        assert_same_bits(table, right)


POSITIONS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("positions", "options", "message"),
    [
        ([[0, 0, 0]], {}, "positions must be a tensor, got list"),
        (POSITIONS.float(), {}, "positions must be int64 or int32, got float32"),
        (POSITIONS[0], {}, "positions must be [..., S, A] with A=3, the number of axes, got [3]"),
        (
            POSITIONS,
            {"axes": (8, 8)},
            "positions must be [..., S, A] with A=2, the number of axes, got [2, 3]",
        ),
        (
            POSITIONS + 2**25,
            {},
            "positions must be between -16777216 and 16777216, got 33554432 to 33554432",
        ),
        (
            POSITIONS,
            {"axes": (16, 56, 55)},
            "axes must be a list of even integers of at least 2, got (16, 56, 55)",
        ),
        (POSITIONS, {"axes": ()}, "axes must be a list of even integers of at least 2, got ()"),
        (POSITIONS, {"theta": 0}, "theta must be a positive finite float32, got 0"),
        (POSITIONS, {"theta": math.inf}, "theta must be a positive finite float32, got inf"),
    ],
)
def test_tables_wrong_argument_is_named_with_its_value(positions, options, message):
    with pytest.raises(ArgumentError) as caught:
        rope_tables(positions, **options)
    assert str(caught.value) == f"rope_tables: {message}"


def holder(samples=2):
    return RopeTables(*rope_tables(qwen_image_positions([[(1, 6, 5)]] * samples, 3)))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.bfloat16(),
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.type(torch.float16),
        lambda m: m.to("cpu", torch.bfloat16),
        lambda m: m.to("meta"),
        lambda m: m.to("meta").to_empty(device="cpu"),
        lambda m: m.share_memory(),
        lambda m: m.train().requires_grad_(False),
        copy.deepcopy,
    ],
)
def test_holder_inside_a_module_keeps_its_bits_through(change):
    tables = holder()
    expected = [table.clone() for table in tables()]
    model = change(nn.Sequential(nn.Linear(2, 2), tables))
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    assert not list(tables.parameters()) + list(tables.buffers())
    for table, right in zip(model[1](), expected, strict=True):
        assert_same_bits(table, right)
        assert table.device.type == "cpu"
    assert str(model[1]) == "RopeTables((2, 33, 64), device=cpu)"


def test_holder_saved_as_a_whole_comes_back_with_its_bits():
    tables, file = holder(), io.BytesIO()
    torch.save(tables, file)
    file.seek(0)
    for table, right in zip(torch.load(file, weights_only=False)(), tables(), strict=True):
        assert_same_bits(table, right)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_holder_moved_to_a_gpu_and_back_keeps_bits_and_shared_memory():
    tables = holder()
    expected = [table.clone() for table in tables()]
    for device in ("cuda", "cpu"):
        tables.to(device, torch.bfloat16)
        for table, right in zip(tables(), expected, strict=True):
            assert (table.device.type, table.stride(0)) == (device, 0)
            assert_same_bits(table, right)


FP32 = torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("cos", "sin", "message"),
    [
        (FP32.bfloat16(), FP32, "cos must be a float32 tensor, got bfloat16"),
        (FP32, None, "sin must be a float32 tensor, got NoneType"),
        (FP32, FP32[:1], "sin must be [2, 4] like cos, got [1, 4]"),
        (FP32[0], FP32, "cos must be [S, D/2] or [B, S, D/2], got [4]"),
        (FP32, FP32.to("meta"), "sin must be on cpu like cos, got meta"),
        (FP32, FP32 + torch.ones(4, requires_grad=True), "sin must be without gradient, got "
        "requires_grad=True"),
    ],
)  # fmt: skip
def test_holder_wrong_table_is_named_with_its_value(cos, sin, message):
    with pytest.raises(ArgumentError) as caught:
        RopeTables(cos, sin)
    assert str(caught.value) == f"RopeTables: {message}"


def test_positions_import_brings_no_library_of_models():
    program = "import sys, rlk_rope.positions; print(sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert "'torch'" in loaded
    for name in ("diffusers", "transformers", "triton"):
        assert f"'{name}'" not in loaded
