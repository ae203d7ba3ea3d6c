# SPDX-License-Identifier: Apache-2.0
"""The two ways that are timed sum what they say; the judgment of their times."""

import pytest
import torch

from rlk.compare import assert_same_bits, same_bits
from rlk.exact_grad import overhead
from rlk.operator import Workload
from rlk.publish import PUBLISHED, publish
from rlk.records import ExactGradRow, decode
from rlk.test_support import tiny_operator

OPERATOR = tiny_operator(
    "tiny_overhead", workloads=(Workload("somewhere", {"T": 40, "N": 8}, scalars={"factor": 0.5}),)
)
publish(OPERATOR)
SETS = 5


class Work(overhead.Work):
    """A work of few sets."""

    sets = SETS


@pytest.fixture
def ways():
    (found,) = overhead.works(OPERATOR, torch.float32, ())
    fields = ("operator", "site", "sizes", "dtype", "arguments", "layout")
    return overhead.Accumulation(Work(*(getattr(found, name) for name in fields)), "cpu")


def gradient(ways, sets):
    """That of one ordinary call on these sets."""
    x = torch.cat([ways._inputs[i][0] for i in sets]).detach()
    weight = ways._inputs[0][1]
    (y,) = PUBLISHED["tiny_overhead"]((x, weight), {"factor": 0.5})
    return torch.autograd.grad(y, weight, torch.cat([ways._upstream[i][0] for i in sets]))[0]


def test_steps_of_both_ways_sum_the_same_calls_one_of_them_exactly(ways):
    for make in (ways.rounding, ways.exact):
        step = make()
        ways.gradients[0].zero_()
        rows = [step(i)[0] for i in range(SETS)]
        assert not same_bits(rows[0], rows[1])
        if make == ways.rounding:
            rounded = ways.gradients[0].clone()
    whole = gradient(ways, range(SETS))
    assert_same_bits(ways.finish()[0], whole, "exact")
    assert_same_bits(ways.gradients[0], torch.zeros(8), "what parameters get beside carriers")
    assert_same_bits(rounded, sum(gradient(ways, [i]) for i in range(SETS)), "rounded")
    assert not same_bits(rounded, whole)
    assert ways.state_bytes == 208 * 8


def row(overhead_found, rows=262144, columns=128):
    return ExactGradRow(
        operator="demo", size=f"{rows}x{columns}", rows=rows, columns=columns, dtype="bfloat16",
        overhead=overhead_found, rounding_us=100.0, rounding_spread_us=1.0,
        exact_us=100 * (1 + overhead_found), exact_spread_us=1.0, end_of_block_host_us=50.0,
        state_bytes=26624, rounding_peak_bytes=1000, exact_peak_bytes=2000,
        end_of_block_peak_bytes=3000,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        ([row(0.03), row(0.5, rows=7)], []),
        ([row(-0.01), row(0.031)], ["demo 262144x128: a backward takes 3.1% longer"]),
        ([row(float("nan"))], ["demo 262144x128: a backward takes nan% longer"]),
        ([row(0.0, columns=2048)], ["no operator was measured at 262144 rows of 128"]),
        ([], ["no operator was measured at 262144 rows of 128"]),
    ],
)
def test_judgment_is_of_the_size_that_is_promised(rows, wrong):
    found = overhead.judge(rows)
    assert [f.partition(",")[0] for f in found] == wrong


@pytest.mark.parametrize(("found", "status"), [(0.01, 0), (0.2, 1)])
def test_command_prints_and_records_what_it_measured(monkeypatch, tmp_path, capsys, found, status):
    made = overhead.origin(command="measured")
    monkeypatch.setattr(overhead, "origin", lambda command: made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(overhead.select, "every", lambda: [OPERATOR])
    monkeypatch.setattr(overhead, "measure", lambda work: row(found))
    assert overhead.main(["--json", str(tmp_path / "found.json")]) == status
    record = decode((tmp_path / "found.json").read_bytes())
    assert [r.overhead for r in record.rows] == [found]
    assert bool(record.wrong) == bool(status)
    assert record.origin == made
    out = capsys.readouterr().out
    assert "state 26624 bytes" in out
    assert "peak 1000 bytes rounding, 2000 exact, 3000 at the end" in out


def test_command_without_a_gpu_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert overhead.main([]) == 2
    assert "the machine must have an NVIDIA GPU, got none" in capsys.readouterr().err
