# SPDX-License-Identifier: Apache-2.0
"""The strict-math probe on processors that compute right and wrong."""

import ctypes
import json
import math
import re
import struct
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from rlk.cuda import build, probe
from rlk.errors import PlatformError

LAUNCH = (Path(probe.__file__).with_name("launch.cuh")).read_text()
SMALLEST = Fraction(1, 2**149)
SMALLEST_NORMAL = Fraction(1, 2**126)


def nearest(value):
    """The FP32 value nearest to a positive rational or zero, ties to even."""
    if value == 0:
        return Fraction(0)
    exponent = math.floor(math.log2(value)) - 23
    step = max(Fraction(2) ** exponent, SMALLEST)
    return round(value / step) * step


def root(value):
    """The FP32 value nearest to a square root that is no tie: from 80 bits of it."""
    scale = 2 ** (2 * 160)
    return nearest(Fraction(math.isqrt(int(value * scale)), 2**160))


def right(operation, a, b, c):
    """The correctly rounded result."""
    name = operation.removesuffix("_rn")
    if name == "mul_add":
        return nearest(nearest(a * b) + c)
    exact = {"add": lambda: a + b, "mul": lambda: a * b, "div": lambda: a / b}
    exact["fma"] = lambda: a * b + c
    return root(a) if name == "sqrt" else nearest(exact[name]())


def flushing(operation, a, b, c):
    """A processor that reads and writes subnormals as zero."""
    a, b = (v if v >= SMALLEST_NORMAL else Fraction(0) for v in (a, b))
    result = right(operation, a, b, c)
    return result if result >= SMALLEST_NORMAL else Fraction(0)


def contracting(operation, a, b, c):
    """A compiler that fuses a plain multiplication and addition."""
    return right("fma" if operation == "mul_add" else operation, a, b, c)


def approximating(operation, a, b, c):
    """A compiler that divides by multiplying with a rounded reciprocal."""
    return nearest(a * nearest(1 / b)) if operation == "div" else right(operation, a, b, c)


def rough_root(operation, a, b, c):
    """A compiler that takes roots as a times a rounded reciprocal root."""
    return nearest(a * root(1 / a)) if operation == "sqrt" else right(operation, a, b, c)


class Binary:
    """A library whose probe computes as it is told."""

    operator = "demo"

    def __init__(self, processor=right, digest="d"):
        self.processor, self.digest = processor, digest
        self.probes = 0

    def function(self, name, arguments):
        return self.run if name == "rlk_probe" else lambda: 13000

    def check(self, status, what):
        assert status == 0

    def run(self, device, questions, answers):
        self.probes += 1
        for index, case in enumerate(struct.iter_unpack("ifff", questions)):
            operation = probe.OPERATIONS[case[0]]
            a, b, c = map(Fraction, case[1:])
            value = float(self.processor(operation, a, b, c))
            ctypes.memmove(ctypes.addressof(answers) + 4 * index, struct.pack("f", value), 4)
        return 0


@pytest.fixture(autouse=True)
def gpu(monkeypatch, tmp_path):
    """A GPU with a name, and an empty cache."""
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_cases_of_the_probe_expect_correctly_rounded_values():
    for case in probe.cases():
        values = map(Fraction, (case.a, case.b, case.c))
        expected = struct.unpack("f", struct.pack("f", case.expected))[0]
        assert right(case.operation, *values) == Fraction(expected), case


def test_cases_of_the_probe_cover_every_operation():
    assert {case.operation for case in probe.cases()} == set(probe.OPERATIONS)


def test_capacity_of_the_probe_agrees_with_the_kernel():
    assert f"constexpr int kProbeCases = {probe.CAPACITY};" in LAUNCH
    assert len(probe.cases()) <= probe.CAPACITY


def test_operations_of_the_probe_stand_in_the_kernel_in_this_order():
    """Each case of the kernel's switch holds the operator or intrinsic of that name."""
    written = re.findall(r"case (\d): result = (.*); break;", LAUNCH)
    assert [int(number) for number, _ in written] == list(range(len(probe.OPERATIONS)))
    assert [text for _, text in written] == [
        "v.a + v.b", "v.a * v.b", "v.a * v.b + v.c", "v.a / v.b", "sqrtf(v.a)",
        "__fadd_rn(v.a, v.b)", "__fmul_rn(v.a, v.b)", "__fmaf_rn(v.a, v.b, v.c)",
        "__fdiv_rn(v.a, v.b)", "__fsqrt_rn(v.a)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("processor", "failed"),
    [
        (right, []),
        (flushing, ["subnormals"]),
        (contracting, ["separate roundings"]),
        (approximating, ["division"]),
        (rough_root, ["square root"]),
    ],
)
def test_processor_with_one_fault_fails_in_that_subject(processor, failed):
    assert probe.run(Binary(processor), 0) == failed


def test_verdict_that_passed_is_remembered_on_disk():
    first, second = Binary(), Binary()
    probe.require(first, 0)
    probe.require(second, 0)
    assert (first.probes, second.probes) == (1, 0)


def test_verdict_that_failed_is_remembered_on_disk():
    first, second = Binary(contracting), Binary()
    for binary in (first, second):
        with pytest.raises(PlatformError) as raised:
            probe.require(binary, 0)
    assert str(raised.value) == (
        "demo: GPU 0 must compute separate roundings as IEEE 754 says, got other bits; "
        "choose another backend"
    )
    assert (first.probes, second.probes) == (1, 0)


def test_verdict_of_another_gpu_is_not_taken():
    binary = Binary()
    probe.require(binary, 0)
    probe.require(binary, 1)
    assert binary.probes == 2


def test_verdict_of_another_binary_is_not_taken():
    probe.require(Binary(), 0)
    other = Binary(digest="e")
    probe.require(other, 0)
    assert other.probes == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"failed": []}', "\0"])
def test_verdict_file_that_is_damaged_is_replaced(tmp_path, text):
    probe.require(Binary(), 0)
    (file,) = tmp_path.glob("strict-math-*.json")
    file.write_text(text)
    second = Binary()
    probe.require(second, 0)
    assert second.probes == 1
    assert json.loads(file.read_text())["failed"] == []


def test_verdict_in_a_cache_that_is_read_only_is_asked_again(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    binary = Binary()
    probe.require(binary, 0)
    probe.require(binary, 0)
    assert binary.probes == 2


def test_verdict_without_a_home_is_asked_again(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(build.CACHE_VARIABLE)
    monkeypatch.setattr(build.Path, "home", no_home)
    binary = Binary()
    probe.require(binary, 0)
    probe.require(binary, 0)
    assert binary.probes == 2
