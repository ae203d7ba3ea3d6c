# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels of layer_norm_modulate on the CPU: the bits of golden."""

import ctypes
from pathlib import Path

import pytest
import torch

from rlk.compare import assert_same_bits
from rlk.reduce import exact_sum
from rlk.test_support import on_host

from . import golden

HERE = Path(__file__).parent
POINTERS = (
    *("dout", "x", "scale", "shift", "out", "mean", "rstd"),
    *("dx", "dscale", "dshift", "workspace"),
)
NUMBERS = ("T", "S", "N", "apart", "blocks", "parts", "per")


class Call(ctypes.Structure):
    """The struct of that name in test_kernels.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_longlong) for name in NUMBERS),
        ("narrow", ctypes.c_int),
        ("eps", ctypes.c_float),
    ]  # fmt: skip


# (T, S, N, blocks): samples of one token and of a few, by blocks of whole samples; turns that are
# not full, samples that begin within a turn, lanes and warps without columns.
ALONE = (
    (1, 1, 8, 1), (7, 1, 264, 3), (5, 3, 328, 2), (9, 3, 264, 4), (3, 2, 40, 1), (2, 9, 37, 2),
    (2, 5, 2056, 1), (4, 3, 300, 3),
)  # fmt: skip
# The same with parts of tokens: several blocks share a sample.
SHARED = ((1, 21, 328, 3), (2, 13, 264, 2), (1, 9, 37, 4), (1, 7, 2056, 2))
# Powers of two for terms that move windows and are lost by doubles.
FAR = (-126, -100, -60, -40, -20, -8, 0, 10, 20, 40, 80)
# By so many that each adds to one of several copies of the sums.
CROWD = 70
CROWDED = ((1, 2 * CROWD, 40, CROWD), (2, 2 * CROWD - 1, 37, CROWD))
# Tokens of a column whose sum lies beside the middle of two BF16 numbers, and how many blocks share
# them: a small one decides, which the block that adds it or a later one could lose.
HALF_WAY = (1.0, 2.0**-8)
LOST = {
    "beside a smaller one": ((2.0**-130, 0.0, *HALF_WAY), 2),
    "beside a larger one": ((*HALF_WAY, 2.0**-130, 0.0), 2),
    "by both levels": ((*HALF_WAY, 2.0**-60, 0.0, 2.0**-130, 0.0, -(2.0**-60), 0.0), 4),
    "where a window moved": ((1.0, 2.0**-60, 2.0**20, 2.0**-8, -(2.0**20), 0.0, 0.0, 0.0), 2),
    "with an error": ((*HALF_WAY, 2.0**-60, 2.0**-130, -(2.0**-60), 0.0), 3),
    "in one block": (
        (2.0**40, 2.0**32, 2.0**-5, 2.0**-60, 2.0**-120, -(2.0**-60), -(2.0**-5), *9 * (0.0,)),
        2,
    ),
}  # fmt: skip
# Binades of the windows of terms of so many significant bits; 2^4 is their end where 1 came first.
WINDOWS, ABOVE = {8: 40, 24: 27}, 4
KINDS = ("decades", "alternating", "zeros", "cancelling", "specials", "patterns", "ties")


def numbers(kind: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """FP32 values [T, S, N] or [T, N] of a kind."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    tokens = values.flatten(0, -2)
    if kind == "decades":
        powers = torch.randint(-60, 60, shape, generator=generator)
        values = (values.double() * powers.double().exp2()).float()
    elif kind == "alternating":
        tokens[::2] *= 2.0**30
        tokens[1::3] *= 2.0**-30
    elif kind == "zeros":
        tokens[::2] = 0.0
        values[torch.rand(shape, generator=generator) < 0.2] = -0.0
    elif kind == "cancelling":
        tokens[1::2] = -tokens[: len(tokens) // 2 * 2 : 2]
        tokens[::3] *= 2.0**40
    elif kind == "specials":
        at = torch.rand(shape, generator=generator)
        values[at < 0.01], values[at > 0.99] = torch.nan, torch.inf
        values[(at > 0.5) & (at < 0.51)] = -torch.inf
    elif kind == "ties":
        # 1 + 2^-8 lies between two BF16 numbers; what decides is beyond a double, of either sign.
        tokens[:] = 0.0
        values[..., :1, :], values[..., 1:2, :] = 1.0, 2.0**-8
        values[..., 2:3, ::2], values[..., 2:3, 1::2] = 2.0**-70, -(2.0**-70)
        values *= torch.randint(0, 2, shape[-1:], generator=generator) * 2 - 1
    elif kind in LOST:
        values[:] = 0.0
        values[:, : len(LOST[kind][0])] = torch.tensor(LOST[kind][0])[:, None]
        values *= torch.randint(0, 2, shape[-1:], generator=generator) * 2 - 1
    elif kind == "mixed":
        # Few magnitudes, far from each other, that cancel; and ties that a small one decides.
        few = torch.tensor(FAR)[torch.randperm(len(FAR), generator=generator)[:4]]
        powers = few[torch.randint(0, 4, (*shape[:-1], 1), generator=generator)].expand(shape)
        values = torch.ldexp(values.double(), powers.double()).float()
        values[torch.rand(shape, generator=generator) < 0.3] = 0.0
        if len(shape) == 3:
            half = (shape[1] - 3) // 2
            order = torch.randperm(shape[1], generator=generator)
            values[:, order[3 : 3 + half]] = -values[:, order[3 + half : 3 + 2 * half]]
            tie = torch.tensor((1.0, 2.0**-8, 2.0**-100))[:, None]
            values[:, order[:3], ::2] = tie.expand(3, len(values[0, 0, ::2]))
    elif kind == "patterns":
        bits = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator)
        values = bits.int().view(torch.float32)
    return values


def spread(tensor: torch.Tensor, apart: int) -> torch.Tensor:
    """A copy whose elements lie `apart` from each other."""
    out = torch.full((*tensor.shape, apart), torch.nan, dtype=tensor.dtype)
    out[..., 0] = tensor
    return out


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """test_kernels.cu for the CPU."""
    root = HERE.parents[1]
    return on_host.library(HERE / "test_kernels.cu", tmp_path_factory.mktemp("kernels"), root)


def check(
    library: ctypes.CDLL,
    kind: str,
    size: tuple[int, int, int],
    blocks: int,
    parts: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    apart: int = 1,
    wanted: tuple[str, ...] = ("x", "scale", "shift"),
    seed: int = 0,
) -> None:
    """Every result of both kernels has the bits of golden."""
    t, s, n = size
    eps = 1e-6
    x, dout = (numbers(kind, (t, s, n), 4 * seed + i).to(dtype) for i in (1, 2))
    scale, shift = (numbers("normal", (t, n), 4 * seed + i).to(dtype) for i in (3, 4))
    out, mean, rstd = golden.forward(x, scale, shift, eps=eps)
    expected = dict(zip(("out", "mean", "rstd"), (out, mean, rstd), strict=True))
    given = (dout, x, scale, shift, mean, rstd)
    gradients = golden.backward(*given, eps=eps, needs=frozenset(wanted))
    expected |= dict(zip(("dx", "dscale", "dshift"), gradients, strict=True))
    expected = {name: tensor for name, tensor in expected.items() if tensor is not None}
    # Every element must be written.
    found = {name: torch.full_like(tensor, 7.0) for name, tensor in expected.items()}
    kept = {"dout": dout, "x": x, "scale": scale, "shift": shift}
    kept = {name: spread(tensor, apart) for name, tensor in kept.items()}
    # Full of ones: nothing may count on zeros. 16: doubles of a column, both sums in 4 copies.
    workspace = torch.full((t * 16 * (n + 256),), -1, dtype=torch.int64)
    call = Call(T=t, S=s, N=n, apart=apart, narrow=dtype == torch.bfloat16, eps=eps)
    for name, tensor in (kept | found).items():
        setattr(call, name, tensor.data_ptr())
    per = -(-t * s // blocks)
    call.blocks, call.per = -(-t * s // per), per
    library.run_call(ctypes.byref(call), 1)
    call.parts, call.per = parts or 1, -(-s // (2 * parts)) * 2 if parts else s
    call.blocks = t * parts if parts else blocks
    call.workspace = workspace.data_ptr() if parts else None
    library.run_call(ctypes.byref(call), 0)
    for name, tensor in found.items():
        assert_same_bits(tensor, expected[name], f"{name} {kind} {size} {parts}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ALONE, ids=str)
def test_samples_of_a_block_any_values_have_the_bits_of_golden(
    library: ctypes.CDLL, case: tuple[int, int, int, int], kind: str
) -> None:
    check(library, kind, case[:3], case[3])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", SHARED + CROWDED, ids=str)
def test_samples_of_several_blocks_any_values_have_the_bits_of_golden(
    library: ctypes.CDLL, case: tuple[int, int, int, int], kind: str
) -> None:
    check(library, kind, case[:3], case[3], parts=case[3])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("bits", WINDOWS)
def test_sums_of_a_thread_at_the_ends_of_a_window_are_exact(
    library: ctypes.CDLL, bits: int, seed: int
) -> None:
    """The largest terms, as many as fill the first level, and long ones around its least."""
    generator = torch.Generator().manual_seed(seed)
    pick = torch.randint(0, 1 << 22, (2, 402, 8), generator=generator)
    above = 2.0**ABOVE
    largest, least = above * (1 - 2.0**-bits), above * 2.0 ** -WINDOWS[bits]
    odd = pick[0] % (1 << (bits - 1)) | 1
    terms = torch.full((402, 8), largest)
    small = (least * (1 + odd * 2.0 ** (1 - bits)) * 0.5 ** (pick[1] // 4 % 2)).float()
    # Half of the columns return to where small terms alone are left.
    terms[200:, ::2] = -largest
    terms = torch.where(pick[1] % 4 == 0, small, terms)
    terms[:2] = 1.0
    state = torch.zeros(13, 8, dtype=torch.int64)
    given = ctypes.c_void_p(terms.data_ptr()), ctypes.c_longlong(len(terms))
    found = library.sum_terms(*given, bits, ctypes.c_void_p(state.data_ptr()))
    # Lost or not finite in no column.
    assert found & 0xFFFFFF == 0
    wanted = exact_sum.add_rows(exact_sum.new(8), terms, backend="golden")
    assert_same_bits(exact_sum.merge(state, exact_sum.new(8)), wanted, f"{bits} bits")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("parts", [2, 5, CROWD])
def test_far_magnitudes_of_several_blocks_have_the_bits_of_golden(
    library: ctypes.CDLL, parts: int, dtype: torch.dtype
) -> None:
    for seed in range(20):
        check(library, "mixed", (1, 2 * parts + seed % 2 - 1 + 4, 40), 1, parts, dtype, seed=seed)


@pytest.mark.parametrize("kind", LOST)
def test_small_term_of_several_blocks_is_lost_by_none(library: ctypes.CDLL, kind: str) -> None:
    tokens, parts = LOST[kind]
    check(library, kind, (2, len(tokens), 264), 1, parts)
    check(library, kind, (1, 2 * CROWD, 264), 1, CROWD)


@pytest.mark.parametrize("parts", [0, 2])
@pytest.mark.parametrize("apart", [1, 2])
@pytest.mark.parametrize("kind", ["normal", "decades", "patterns"])
def test_fp32_any_strides_have_the_bits_of_golden(
    library: ctypes.CDLL, kind: str, apart: int, parts: int
) -> None:
    check(library, kind, (2, 5, 264), 3, parts, torch.float32, apart)


@pytest.mark.parametrize("parts", [0, 2])
@pytest.mark.parametrize("wanted", [("x",), ("scale",), ("shift",), ("x", "shift")], ids=str)
def test_some_gradients_alone_have_the_bits_of_golden(
    library: ctypes.CDLL, wanted: tuple[str, ...], parts: int
) -> None:
    check(library, "decades", (2, 5, 600), 3, parts, wanted=wanted)


def test_many_tokens_of_one_scale_have_the_bits_of_golden(library: ctypes.CDLL) -> None:
    # Sums that outgrow what the first level is made for, and that windows follow.
    check(library, "normal", (1, 301, 40), 1)
    check(library, "alternating", (1, 301, 40), 1)


def test_small_device_writes_no_more_workspace_than_it_asks_for(library: ctypes.CDLL) -> None:
    # Neither one pass for all nor a ring for dx fits, so that sums have a plan of their own.
    size = t, s, n = 1, 24, 2176
    dout, x = (numbers("decades", size, seed) for seed in (1, 2))
    scale = numbers("normal", (t, n), 3)
    mean, rstd = torch.zeros(t, s), torch.ones(t, s)
    given = {"dout": dout, "x": x, "scale": scale, "shift": scale, "mean": mean, "rstd": rstd}
    wanted = frozenset(("x", "scale", "shift"))
    expected = golden.backward(*given.values(), eps=0.0, needs=wanted)
    found = {"dx": torch.empty(size), "dscale": torch.empty(t, n), "dshift": torch.empty(t, n)}
    call = Call(T=t, S=s, N=n, apart=1)
    for name, tensor in (given | found).items():
        setattr(call, name, tensor.data_ptr())
    asked = ctypes.c_longlong(-1)
    assert library.launch_backward(ctypes.byref(call), ctypes.byref(asked)) == 0
    # 1 MiB more, which must stay as it is.
    workspace = torch.full((asked.value + (1 << 20),), 85, dtype=torch.uint8)
    call.workspace = workspace.data_ptr()
    assert library.launch_backward(ctypes.byref(call), None) == 0
    assert_same_bits(workspace[asked.value :], torch.full((1 << 20,), 85, dtype=torch.uint8))
    for (name, tensor), bits in zip(found.items(), expected, strict=True):
        assert_same_bits(tensor, bits, name)
