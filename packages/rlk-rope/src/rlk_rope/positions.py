# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of a text and its images are, and the cosines and sines of those positions."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rlk.errors import ArgumentError

__all__ = ["RopeTables", "qwen_image_positions", "rope_tables"]

Grid = tuple[int, int, int]

# (frame, height, width): rotated channels of a head, 128 together.
QWEN_IMAGE_AXES = (16, 56, 56)
# FP32 holds every integer up to here.
LARGEST_POSITION = 2**24


def qwen_image_positions(
    grids: Sequence[Any], text_length: int | Sequence[int], *, centred: bool = True
) -> torch.Tensor:
    """Positions (frame, height, width) of the tokens [text, images] of each sample.

    Frame f of image i is at i + f. Rows of an image of height h are at -(h - h//2) .. h//2 - 1 if
    centred, else 0 .. h - 1; columns alike. All three axes of text token t are at m + t, with m
    the largest h//2 or w//2 of the sample if centred, else its largest h or w. A sample with
    fewer image tokens than another is padded at its end with (0, 0, 0), which rotates nothing.

    Args:
        grids: one entry a sample: the list of its images' (frames, height, width), in patches, or
            one such triple alone. As `img_shapes` of diffusers, but samples may differ in size.
        text_length: text tokens, any number; or one number a sample, of which the largest counts
            for all, since diffusers gives text padding the positions after the text.
        centred: `scale_rope` of diffusers, True in Qwen-Image.
    Returns:
        positions: int64 [B, S, 3] on the CPU; stride 0 along B if all samples have the same grids.
    Raises:
        ArgumentError: a size is no integer or too small; the message names the argument.
    Source: diffusers `QwenEmbedRope`, 0.35.0 and 0.42.1.
    """
    if not _is_list(grids):
        wanted = "a list with one entry a sample"
        raise _error("qwen_image_positions", "grids", wanted, repr(grids))
    samples = [_images(sample, number) for number, sample in enumerate(grids)]
    length = _text_length(text_length, len(samples))
    if samples and all(sample == samples[0] for sample in samples):
        return _sample(samples[0], length, centred).expand(len(samples), -1, -1)
    rows = [_sample(sample, length, centred) for sample in samples]
    longest = max((len(row) for row in rows), default=length)
    positions = torch.zeros(len(rows), longest, 3, dtype=torch.int64, device="cpu")
    for padded, row in zip(positions, rows, strict=True):
        padded[: len(row)] = row
    return positions


def rope_tables(
    positions: torch.Tensor,
    axes: Sequence[int] = QWEN_IMAGE_AXES,
    theta: float = 10000.0,
    *,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of each position times each frequency, the axes side by side.

        angle = position * theta^(-2i/d),  i = 0 .. d/2 - 1 for each axis of d channels

    Computed by eager PyTorch on the CPU wherever the tables are to be, so equal in every bit to
    what diffusers builds on the same machine. The power and the angle are rounded to FP32, and
    the power's last bit depends on the vector instructions that PyTorch uses: ship the tables
    where two kinds of CPU must agree.

    Args:
        positions: [..., S, A], integers, from `qwen_image_positions` or your own.
        axes: A even numbers of channels; D is their sum.
        theta: base of the frequencies, positive.
        device: of the tables; None: that of positions.
    Returns:
        cos, sin: FP32 [..., S, D/2]. Samples that share positions by stride 0 share the tables.
    Raises:
        ArgumentError: shape, dtype or value does not fit, or the call is being compiled.
    Source: diffusers `QwenEmbedRope.rope_params`, 0.35.0 and 0.42.1.
    """
    if torch.compiler.is_compiling():
        raise _error("rope_tables", "the call", "outside compiled code", "one inside it")
    _check_axes(axes, theta)
    _check_positions(positions, len(axes))
    distinct = positions[:1] if _is_shared(positions) else positions
    by_axis = zip(distinct.cpu().unbind(-1), axes, strict=True)
    table = torch.cat([_polar(positions, d, theta) for positions, d in by_axis], -1)
    device = positions.device if device is None else torch.device(device)
    shape = (*positions.shape[:-1], table.shape[-1])
    cos, sin = (part.contiguous().to(device).expand(shape) for part in (table.real, table.imag))
    return cos, sin


class RopeTables(nn.Module):
    """Holds cos and sin in FP32, whatever happens to the dtype of the module around it.

    `.to(dtype)`, `.half()`, `.bfloat16()` and `.double()` leave them alone; `.to(device)`,
    `.cuda()` and `to_empty` move them with their values, and "meta" is no place for them. They are
    plain attributes, neither parameters nor buffers: absent from the state_dict, not broadcast by
    DDP, not cast by the mixed precision of FSDP.

    Args:
        cos: FP32 [S, D/2] or [B, S, D/2], from `rope_tables`.
        sin: as cos.
    Raises:
        ArgumentError: a table is not FP32 or requires a gradient, or the two do not match.
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        super().__init__()
        _check_tables(cos, sin)
        self.cos = cos
        self.sin = sin

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin."""
        return self.cos, self.sin

    def extra_repr(self) -> str:
        """Shape and device, as torch prints them."""
        return f"{tuple(self.cos.shape)}, device={self.cos.device}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        device = fn(self.cos.new_empty(0)).device
        if device.type != "meta":
            self.cos, self.sin = (_move(table, device) for table in (self.cos, self.sin))
        return self


def _sample(images: Sequence[Grid], text_length: int, centred: bool) -> torch.Tensor:
    sides = [side for _, height, width in images for side in (height, width)]
    start = max((side // 2 if centred else side for side in sides), default=0)
    text = torch.arange(start, start + text_length, device="cpu")[:, None].expand(-1, 3)
    parts = [_image(first_frame, *image, centred) for first_frame, image in enumerate(images)]
    return torch.cat([text, *parts])


def _image(first_frame: int, frames: int, height: int, width: int, centred: bool) -> torch.Tensor:
    starts = (first_frame, *(-(side - side // 2) if centred else 0 for side in (height, width)))
    axes = [
        torch.arange(start, start + size, device="cpu")
        for start, size in zip(starts, (frames, height, width), strict=True)
    ]
    return torch.cartesian_prod(*axes)


def _polar(positions: torch.Tensor, channels: int, theta: float) -> torch.Tensor:
    """cos + i sin of one axis, complex64 [..., d/2], each distinct position computed once."""
    values, where = positions.unique(return_inverse=True)
    index = torch.arange(0, channels, 2, device="cpu").to(torch.float32)
    angles = torch.outer(values, 1.0 / torch.pow(theta, index.div(channels)))
    return torch.polar(torch.ones_like(angles), angles)[where]


def _move(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    distinct = table[:1] if _is_shared(table) else table
    return distinct.to(device).expand(table.shape)


def _is_shared(tensor: torch.Tensor) -> bool:
    """Whether the samples of [B, S, ...] are one and the same memory."""
    return tensor.dim() == 3 and tensor.shape[0] > 1 and tensor.stride(0) == 0


def _images(sample: Any, number: int) -> tuple[Grid, ...]:
    several = _is_list(sample) and all(map(_is_list, sample))
    images = []
    for image in sample if several else [sample]:
        sizes = _integers(image, at_least=1)
        if sizes is None or len(sizes) != 3:
            wanted = "a list of (frames, height, width), each at least 1"
            raise _error("qwen_image_positions", f"grids[{number}]", wanted, repr(sample))
        images.append((sizes[0], sizes[1], sizes[2]))
    return tuple(images)


def _text_length(text_length: int | Sequence[int], samples: int) -> int:
    lengths = _integers(text_length if _is_list(text_length) else [text_length], at_least=0)
    if lengths is None:
        wanted = "an integer of at least 0, or one a sample"
        raise _error("qwen_image_positions", "text_length", wanted, repr(text_length))
    if _is_list(text_length) and len(lengths) != samples:
        wanted = f"one number, or one for each of {samples} samples"
        raise _error("qwen_image_positions", "text_length", wanted, f"{len(lengths)} numbers")
    return max(lengths, default=0)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _integers(values: Any, at_least: int) -> list[int] | None:
    """The values as integers; None unless it is a list of integers, each at least so large."""
    if not _is_list(values):
        return None
    if any(isinstance(v, bool) or not hasattr(v, "__index__") for v in values):
        return None
    integers = [operator.index(value) for value in values]
    return integers if all(value >= at_least for value in integers) else None


def _check_axes(axes: Sequence[int], theta: float) -> None:
    channels = _integers(axes, at_least=2)
    if not channels or any(axis % 2 for axis in channels):
        wanted = "a list of even integers of at least 2"
        raise _error("rope_tables", "axes", wanted, repr(axes))
    number = isinstance(theta, (int, float)) and not isinstance(theta, bool)
    if not number or not 0 < theta <= torch.finfo(torch.float32).max:
        raise _error("rope_tables", "theta", "a positive finite float32", repr(theta))


def _check_positions(positions: torch.Tensor, axes: int) -> None:
    if not isinstance(positions, torch.Tensor):
        raise _error("rope_tables", "positions", "a tensor", type(positions).__name__)
    if positions.dtype not in (torch.int64, torch.int32):
        raise _error(
            "rope_tables",
            "positions",
            "int64 or int32",
            str(positions.dtype).removeprefix("torch."),
        )
    if positions.dim() < 2 or positions.shape[-1] != axes:
        wanted = f"[..., S, A] with A={axes}, the number of axes"
        raise _error("rope_tables", "positions", wanted, str(list(positions.shape)))
    low, high = positions.aminmax() if positions.numel() else (0, 0)
    if low < -LARGEST_POSITION or high > LARGEST_POSITION:
        wanted = f"between -{LARGEST_POSITION} and {LARGEST_POSITION}"
        raise _error("rope_tables", "positions", wanted, f"{int(low)} to {int(high)}")


def _check_tables(cos: torch.Tensor, sin: torch.Tensor) -> None:
    for name, table in (("cos", cos), ("sin", sin)):
        if not isinstance(table, torch.Tensor) or table.dtype != torch.float32:
            got = table.dtype if isinstance(table, torch.Tensor) else type(table).__name__
            raise _error("RopeTables", name, "a float32 tensor", str(got).removeprefix("torch."))
        if table.requires_grad:
            raise _error("RopeTables", name, "without gradient", "requires_grad=True")
        if table.dim() not in (2, 3):
            raise _error("RopeTables", name, "[S, D/2] or [B, S, D/2]", str(list(table.shape)))
    if sin.shape != cos.shape:
        wanted = f"{list(cos.shape)} like cos"
        raise _error("RopeTables", "sin", wanted, str(list(sin.shape)))
    if sin.device != cos.device:
        raise _error("RopeTables", "sin", f"on {cos.device} like cos", str(sin.device))


def _error(function: str, argument: str, requirement: str, actual: str) -> ArgumentError:
    return ArgumentError(f"{function}: {argument} must be {requirement}, got {actual}")
