# SPDX-License-Identifier: Apache-2.0
"""mma_schedule passes our tiles, and turns red if one of them forms another chain."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlk import backends, interpreter
from rlk.errors import BackendError
from rlk.gates import Verdict, cases, judge
from rlk.gates.case import Case
from rlk.gates.mma_schedule import QUESTIONS, Matrix, judge_schedule
from rlk.operator import Reduction
from rlk.reduce import mma_chain
from rlk.test_support import tiny_operator

# Before anything imports triton.
INTERPRETED = interpreter.enable_without_gpu()
GPU = torch.cuda.is_available()
DTYPES = ("float32", "bfloat16", "float16")

# Of two steps and of more, on both sides of a tile's rows.
SMALL = Matrix((1, 17), (16, 100), 24, (64,), ("forward", "unaligned"))
CHAINED = tiny_operator(
    "chained",
    reductions=(Reduction("y", "mma_chain", "N"),),
    backends=(
        backends.cuda(lambda: SimpleNamespace()),
        backends.triton(lambda: SimpleNamespace()),
        backends.golden(lambda: SimpleNamespace()),
    ),
)


def planned(backend: str, dtype: str = "bfloat16") -> Case:
    return Case(CHAINED, backend, "mma_schedule", dtype)


def judged(backend: str, module, matrix: Matrix = SMALL, dtype: str = "bfloat16"):
    """The red (question, read) pairs, and all records."""
    case = planned(backend, dtype)
    verdict = Verdict(case, SimpleNamespace(launches=[], device=case.device))
    records = judge_schedule(verdict, module, matrix)
    red = {tuple(r.config.split(" ")[:2]) for r in records if r.status == "failed"}
    return red, records


def split_by_rows(module):
    """The fault: products of one row are the sum of two chains."""

    def product(a, b, bias, initial, dtype, tile):
        # 8: narrow elements of 16 bytes, for a tile of TMA reads from there on.
        k = a.shape[1] // 16 * 8
        if a.shape[0] > 1 or k == 0:
            return module.product(a, b, bias, initial, dtype, tile)
        left = module.product(a[:, :k], b[:, :k], bias, initial, dtype, tile)
        return left + module.product(a[:, k:], b[:, k:], None, None, dtype, tile)

    return SimpleNamespace(product=product, candidates=module.candidates)


def promoted_in_one_tile(module):
    """The fault: the last tile adds what it has after 48 of K to a second accumulator."""

    def product(a, b, bias, initial, dtype, tile):
        last = module.candidates(a, b)[-1]
        if tile != last or a.shape[1] <= 48:
            return module.product(a, b, bias, initial, dtype, tile)
        left = module.product(a[:, :48], b[:, :48], bias, initial, dtype, tile)
        return left + module.product(a[:, 48:], b[:, 48:], None, None, dtype, tile)

    return SimpleNamespace(product=product, candidates=module.candidates)


def starts_from_bits_of_zero(module):
    """The fault: a step of zeros keeps -0."""

    def product(a, b, bias, initial, dtype, tile):
        c = module.product(a, b, bias, initial, dtype, tile)
        return c if initial is None else torch.where(initial == 0, initial, c)

    return SimpleNamespace(product=product, candidates=module.candidates)


FAULTS = {
    split_by_rows: {"same_chain"},
    promoted_in_one_tile: {"same_chain"},
    starts_from_bits_of_zero: {"zero_step"},
}


def test_cases_only_kernels_of_operators_with_a_chain_have_the_judgment() -> None:
    found = {c.backend for c in cases([CHAINED]) if c.judgment == "mma_schedule"}
    assert found == {"cuda", "triton"}
    other = replace(CHAINED, reductions=(Reduction("dweight", "exact_sum", "T"),))
    assert not [c for c in cases([other]) if c.judgment == "mma_schedule"]


@pytest.mark.skipif(GPU, reason="needs a machine without a GPU")
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_judge_without_a_gpu_is_not_run(backend) -> None:
    (record,) = judge(planned(backend))
    assert (record.status, record.comparisons) == ("not_run", 0)
    assert record.reason.startswith("it needs an NVIDIA GPU")


@pytest.mark.skipif(not INTERPRETED, reason="needs triton in its interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
def test_schedule_of_our_tiles_in_the_interpreter_passes(dtype) -> None:
    module = mma_chain.backend_module("triton")
    cuts = (64,)
    red, records = judged("triton", module, replace(SMALL, cuts=cuts), dtype)
    assert red == set()
    counts = Counter(r.config.split(" ")[0] for r in records)
    assert set(counts) == set(QUESTIONS)
    assert {r.comparisons for r in records if "same_chain" in r.config} == {4}
    assert records[0].provenance.requested == "triton"


@pytest.mark.skipif(not INTERPRETED, reason="needs triton in its interpreter")
@pytest.mark.parametrize("fault", FAULTS)
def test_schedule_planted_fault_turns_its_question_red(fault) -> None:
    matrix = replace(SMALL, reads=("forward",))
    red, _ = judged("triton", fault(mma_chain.backend_module("triton")), matrix)
    assert red >= {(question, "forward") for question in FAULTS[fault]}
    if fault is not split_by_rows:
        assert {question for question, _ in red} <= FAULTS[fault] | {"continued_chain"}


@pytest.mark.skipif(not INTERPRETED, reason="needs triton in its interpreter")
def test_schedule_of_another_backend_is_red() -> None:
    matrix = Matrix((2,), (16,), 8, (), ("forward",))
    red, records = judged("cuda", mma_chain.backend_module("triton"), matrix)
    assert {r.status for r in records} == {"failed"}
    assert "requested cuda, ran ['triton']" in records[0].reason


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
@pytest.mark.xdist_group("mma_schedule")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_schedule_on_a_gpu_passes_and_sees_planted_faults(backend, dtype) -> None:
    module = mma_chain.backend_module(backend)
    deep = Matrix((1, 17, 257), (16, 100, 1024), 144, (64,), ("forward", "unaligned"))
    red, records = judged(backend, module, deep, dtype)
    assert red == set(), [r.reason for r in records if r.reason]
    for fault, questions in FAULTS.items():
        red, _ = judged(backend, fault(module), replace(deep, reads=("forward",)), dtype)
        assert {question for question, _ in red} >= questions, fault.__name__


def test_backend_module_of_another_name_is_refused() -> None:
    with pytest.raises(BackendError, match="must be one of 'cuda', 'triton', 'golden', got 'fast'"):
        mma_chain.backend_module("fast")
