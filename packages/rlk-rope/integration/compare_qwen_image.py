# SPDX-License-Identifier: Apache-2.0
"""How far the rotation of diffusers is from separately rounded products.

`python packages/rlk-rope/integration/compare_qwen_image.py [DEVICE]` prints a table of diffusers on
that device (cpu if none) beside both roundings on the CPU. Columns: elements whose bits differ; the
largest distance in ulp of the element; the same in ulp of the length of the pair, as rounding
errors of a rotation have the size of its pair, not of a component that nearly cancels; elements
finite in one result only.
"""

import platform
import sys

import diffusers
import torch
from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

from rlk.compare import raw_bits, ulp_distance
from rlk.math import golden
from rlk_rope.positions import qwen_image_positions, rope_tables

TOKENS, HEADS, CHANNELS = 4096 + 77, 4, 128
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def diffusers_rotation(x, cos, sin, device):
    """Their function on a device, complex64 inside."""
    angles = torch.complex(cos, sin).to(device)
    return apply_rotary_emb_qwen(x.to(device), angles, use_real=False).cpu()


def diffusers_gradient(dy, cos, sin, device):
    """Their gradient for an upstream gradient dy."""
    x = torch.zeros_like(dy, requires_grad=True)
    diffusers_rotation(x, cos, sin, device).backward(dy)
    return x.grad


def separate(x, cos, sin):
    """Each product rounded, then the sum."""
    a, b, c, s = operands(x, cos, sin)
    return pairs(a * c - b * s, a * s + b * c, x)


def complex_eager(x, cos, sin):
    """The pattern of complex64 on CUDA: the second product rounded, the first contracted."""
    a, b, c, s = operands(x, cos, sin)
    real = golden.fma(a, c, golden.negate(b * s))
    return pairs(real, golden.fma(a, s, b * c), x)


def operands(x, cos, sin):
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # [B, S, H, D/2]
    c, s = (table[:, None].expand_as(a).contiguous() for table in (cos, sin))
    return a.contiguous(), b.contiguous(), c, s


def pairs(real, imaginary, like):
    return torch.stack([real, imaginary], -1).flatten(-2).to(like.dtype)


def image_tables():
    """Of one image and text behind it."""
    return rope_tables(qwen_image_positions([[(1, 64, 64)]], TOKENS - 4096)[0])


def inputs(cos, sin):
    """Name -> x [1, S, H, D] in FP32."""
    random = torch.Generator().manual_seed(2026)
    normal = torch.randn(1, TOKENS, HEADS, CHANNELS, generator=random)
    exponents = torch.randint(-40, 40, normal.shape, generator=random)
    # Pairs along (sin, cos): the real part cancels to the rounding errors of its products.
    cancelling = torch.stack([sin, cos], -1).flatten(-2)[None, :, None].expand_as(normal)
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-40, 3e38, -3e38, 65504.0, 2.0**-24])
    unbounded = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -1.0])

    def drawn(values):
        return values[torch.randint(len(values), normal.shape, generator=random)]

    return {
        "normal": normal,
        "wide range": torch.ldexp(normal, exponents),
        "cancelling": cancelling.contiguous(),
        "zeros, subnormal, huge": drawn(special),
        "Inf and NaN": drawn(unbounded),
    }


def ulp_of_pair(actual, expected, x):
    """Largest difference in ulp of the dtype at the length of the pair; finite elements only."""
    length = torch.linalg.vector_norm(x.double().unflatten(-1, (-1, 2)), dim=-1)
    info = torch.finfo(actual.dtype)
    spacing = torch.exp2(torch.floor(torch.log2(length.clamp(min=info.tiny)))) * info.eps
    difference = (actual.double() - expected.double()).abs().unflatten(-1, (-1, 2))
    relative = difference / spacing[..., None]
    return relative[relative.isfinite()].max().item() if relative.isfinite().any() else 0.0


def difference(actual, expected, x):
    """The columns of the table."""
    differs = (raw_bits(actual) != raw_bits(expected)).double().mean().item()
    finite = actual.isfinite() & expected.isfinite()
    distance = int(ulp_distance(actual, expected)[finite].amax()) if finite.any() else 0
    unequal = (actual.isfinite() != expected.isfinite()).sum().item()
    return differs, distance, ulp_of_pair(actual, expected, x), unequal


def row(label, dtype, actual, expected, x):
    differs, distance, at_pair, unequal = difference(actual, expected, x)
    name = str(dtype).removeprefix("torch.")
    print(f"{label:58} {name:9} {differs:9.4%} {distance:11} {at_pair:8.2f} {unequal:8}")


def place(device):
    """The processor behind a device."""
    if device == "cpu":
        return f"{torch.backends.cpu.get_cpu_capability()}, {platform.machine()}"
    return torch.cuda.get_device_name(device)


def main(device="cpu"):
    """Print the table of a device."""
    cos, sin = image_tables()
    print(f"torch {torch.__version__}, diffusers {diffusers.__version__}, {place(device)}; "
          f"x [1, {TOKENS}, {HEADS}, {CHANNELS}]")  # fmt: skip
    print(f"{'diffusers against':58} {'dtype':9} {'differ':>9} {'max ulp':>11} {'at pair':>8} "
          f"{'finiteness':>8}")  # fmt: skip
    for name, x in inputs(cos, sin).items():
        for dtype in DTYPES:
            given = x.to(dtype)
            found = diffusers_rotation(given, cos, sin, device)
            row(f"separate: {name}", dtype, found, separate(given, cos, sin), given)
            row(f"FMA pattern: {name}", dtype, found, complex_eager(given, cos, sin), given)
        gradient = diffusers_gradient(x, cos, sin, device)
        row(f"separate, dx: {name}", x.dtype, gradient, separate(x, cos, -sin), x)
    # A row of pairs that is no whole number of vectors: PyTorch multiplies the rest one by one.
    for channels in (8, 62, 126):
        cos, sin = rope_tables(torch.arange(TOKENS)[:, None], (channels,))
        x = torch.randn(1, TOKENS, 3, channels, generator=torch.Generator().manual_seed(7))
        found = diffusers_rotation(x, cos, sin, device)
        row(f"separate: D={channels}", x.dtype, found, separate(x, cos, sin), x)
        row(f"FMA pattern: D={channels}", x.dtype, found, complex_eager(x, cos, sin), x)


if __name__ == "__main__":
    main(*sys.argv[1:])
