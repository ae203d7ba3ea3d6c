# SPDX-License-Identifier: Apache-2.0
"""The interpreter rounds as torch and MPFR do, and a wrong one is refused."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from rlk import interpreter
from rlk.compare import assert_same_bits
from rlk.errors import PlatformError

triton = pytest.importorskip("triton", reason="needs triton")
interpreter.enable_without_gpu()
if not interpreter.is_enabled():
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

import numpy as np  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter as triton_interpreter  # noqa: E402

from rlk.launch import launch_triton  # noqa: E402


@triton.jit
def copy(source_ptr, target_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    # The store casts to the type of its pointer.
    tl.store(target_ptr + at, tl.load(source_ptr + at).to(tl.float32))


@triton.jit
def through_bfloat16(source_ptr, target_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(target_ptr + at, tl.load(source_ptr + at).to(tl.bfloat16).to(tl.float32))


@triton.jit
def describe(target_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.arange(0, ROWS)[:, None]
    table = column * 10 + tl.arange(0, COLUMNS)[None, :]
    tl.store(target_ptr + column * COLUMNS + tl.arange(0, COLUMNS)[None, :], table)
    facts = target_ptr + ROWS * COLUMNS
    tl.store(facts, table.shape[0])
    tl.store(facts + 1, table.shape[1])
    tl.store(facts + 2, tl.sum(table, axis=0).numel)
    tl.store(facts + 3, table.dtype.primitive_bitwidth)
    tl.store(facts + 4, (table == 1).to(tl.int16).dtype.primitive_bitwidth)


def patterns() -> torch.Tensor:
    """[65536] FP32: random bits, a quarter of them ties between BF16 values."""
    generator = torch.Generator().manual_seed(4)
    bits = torch.randint(-(2**31), 2**31, (65536,), generator=generator).to(torch.int32)
    ties = (bits & ~0xFFFF) | 0x8000
    return torch.where(torch.arange(65536) % 4 == 0, ties, bits).view(torch.float32)


def test_cast_fp32_to_bf16_equals_torch() -> None:
    source, target = patterns(), torch.empty(65536, dtype=torch.bfloat16)
    launch_triton(copy, (1,), source, target, COUNT=65536)
    assert_same_bits(target, source.bfloat16())
    wide = torch.empty(65536)
    launch_triton(through_bfloat16, (1,), source, wide, COUNT=65536)
    assert_same_bits(wide, source.bfloat16().float())


def test_cast_every_bf16_to_fp32_equals_torch() -> None:
    source = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    target = torch.empty(65536)
    launch_triton(copy, (1,), source, target, COUNT=65536)
    assert_same_bits(target, source.float())


@pytest.mark.parametrize(("rows", "columns"), [(2, 8), (8, 2), (1, 8), (2, 1), (4, 4)])
def test_launch_blocks_of_several_shapes_have_their_own(rows: int, columns: int) -> None:
    target = torch.empty(rows * columns + 5, dtype=torch.int32)
    launch_triton(describe, (1,), target, ROWS=rows, COLUMNS=columns)
    table = [10 * row + column for row in range(rows) for column in range(columns)]
    assert target.tolist() == [*table, rows, columns, columns, 32, 16]


def test_launch_overflowing_kernel_is_silent(recwarn: pytest.WarningsRecorder) -> None:
    launch_triton(copy, (1,), torch.tensor([3e38, torch.inf]), torch.empty(2).half(), COUNT=2)
    assert not recwarn.list


def test_correct_fma_of_two_roundings_is_replaced() -> None:
    class TwoRoundings(triton_interpreter.InterpreterBuilder):
        def create_fma(self, x, y, z):
            return triton_interpreter.TensorHandle(x.data * y.data + z.data, z.dtype.scalar)

    interpreter._correct(builders(TwoRoundings))
    x, y, z = (
        triton_interpreter.TensorHandle(np.array([v], np.float32), tl.float32)
        for v in (1 + 2.0**-12, 1 + 2.0**-12, -(1 + 2.0**-11))
    )
    assert TwoRoundings().create_fma(x, y, z).data.tolist() == [2.0**-24]


def test_correct_dot_of_patterns_is_replaced() -> None:
    class Patterns(triton_interpreter.InterpreterBuilder):
        def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
            data = np.matmul(a.data, b.data, dtype=d.data.dtype) + d.data
            return triton_interpreter.TensorHandle(data, d.dtype.scalar)

    interpreter._correct(builders(Patterns))

    def dot(a, b, acc, dtype):
        a, b = (triton_interpreter.TensorHandle(v, dtype) for v in (a, b))
        acc = triton_interpreter.TensorHandle(np.array([[acc]], np.float32), tl.float32)
        return Patterns().create_dot(a, b, acc, None, 0).data.tolist()

    # -1.5 * 2 + 1 by the patterns of BF16; 17 ones beside 2^24 by FP16, 16 of them in one step.
    a, b = np.array([[0xBFC0]], np.uint16), np.array([[0x4000]], np.uint16)
    assert dot(a, b, 1.0, tl.bfloat16) == [[-2.0]]
    ones = np.ones((1, 17), np.float16)
    assert dot(ones, ones.T, 2.0**24, tl.float16) == [[2.0**24 + 16]]
    # Integers are left to Triton.
    ones = np.ones((1, 17), np.int8)
    assert dot(ones, ones.T, 0.0, tl.int8) == [[17.0]]


def test_correct_cast_that_cannot_be_replaced_is_refused() -> None:
    class Truncating(triton_interpreter.InterpreterBuilder):
        def create_fp_trunc(self, src, dst_type):
            bits = (src.data.view(np.uint32) >> 16).astype(np.uint16)
            return triton_interpreter.TensorHandle(bits, dst_type.scalar)

    with pytest.raises(PlatformError, match="casts must round to nearest even"):
        interpreter._correct(builders(Truncating))


def builders(builder: type) -> SimpleNamespace:
    """What `_correct` reads of Triton's module, with another builder."""
    return SimpleNamespace(InterpreterBuilder=builder, TensorHandle=triton_interpreter.TensorHandle)


def test_enable_after_triton_was_imported_to_compile_is_refused() -> None:
    script = """
import sys
from rlk import interpreter
from rlk.errors import PlatformError
print(interpreter.is_enabled(), "triton" in sys.modules)
import triton
try:
    interpreter.enable()
except PlatformError as error:
    print(error)
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    state, message = run.stdout.splitlines()
    assert state == "False False"
    assert message.startswith("interpreter: TRITON_INTERPRET must be 1 before triton is imported")
