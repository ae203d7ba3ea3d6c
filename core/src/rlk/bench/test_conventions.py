# SPDX-License-Identifier: Apache-2.0
"""Counting elements that round otherwise: exact on hand-made results, honest on what cannot run."""

from types import SimpleNamespace

import pytest
import torch

from rlk import environment
from rlk.bench import conventions
from rlk.bench.conventions import compared, differences
from rlk.bench.variants import Peer
from rlk.errors import PlatformError, RlkError
from rlk.operator import Workload
from rlk.records import decode
from rlk.test_support.tiny import tiny_operator

BATCHES = [(torch.full((4, 5), float(seed + 1)),) for seed in range(3)]


def as_it_is(x):
    return x


def one_ulp_in_the_second(x):
    other = x.clone()
    if x[0, 0] == 2:
        other.view(torch.int32)[1, 2] += 1
    return other


def test_differences_equal_results_are_none():
    assert differences(as_it_is, as_it_is, BATCHES) == {"ppm": 0.0, "seeds": 0, "of": 3}


def test_differences_one_element_of_sixty_counts_once_in_its_seed():
    found = differences(as_it_is, one_ulp_in_the_second, BATCHES)
    assert found == {"ppm": 1e6 / 60, "seeds": 1, "of": 3}


def test_differences_signs_of_zero_are_bits_too():
    zeros = [(torch.zeros(1, 2),)]
    assert differences(as_it_is, lambda x: x * -1.0, zeros)["ppm"] == 1e6


def test_differences_results_that_are_not_alike_are_refused():
    with pytest.raises(RlkError, match="conventions: results must be alike, got float32"):
        differences(as_it_is, lambda x: x.bfloat16(), BATCHES)


@pytest.fixture
def operator(monkeypatch):
    """An operator with one rounding that runs here and one that does not, and three others."""

    def elsewhere(*tensors):
        raise PlatformError("tiny: the device must be an NVIDIA GPU, got cpu")

    peers = (
        Peer("same", "torch", lambda scalars: lambda x, weight: x),
        Peer("absent", "no-such-distribution", lambda scalars: None),
    )
    art = SimpleNamespace(
        PEERS=peers[:1],
        CONVENTIONS=peers[1:],
        ROUNDINGS={"ieee": lambda x, weight: x, "other": elsewhere},
    )
    monkeypatch.setattr(conventions, "prior_art", lambda operator: art)
    return tiny_operator("tiny", workloads=(Workload("nowhere", {"T": 4, "N": 8}),))


def test_compared_every_rounding_beside_every_other_says_what_was_not_run(operator):
    rows = list(compared(operator, "cpu", rows=2, seeds=2))
    found = {(r.rounding, r.other): (r.ppm, r.missing) for r in rows}
    refused = "PlatformError: tiny: the device must be an NVIDIA GPU, got cpu"
    assert found == {
        ("ieee", "same"): (0.0, None),
        ("ieee", "absent"): (None, "not installed"),
        ("other", "same"): (None, refused),
        ("other", "absent"): (None, "not installed"),
    }


def test_compared_operator_without_a_rounding_of_its_own_makes_no_inputs(operator, monkeypatch):
    monkeypatch.setattr(conventions, "prior_art", lambda operator: None)
    monkeypatch.setattr(conventions, "fixture", None)
    assert list(compared(operator, "cpu", rows=2, seeds=2)) == []


def test_command_record_has_a_line_for_each_row(operator, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(conventions.select, "named", lambda names: [operator])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "record.json"
    assert conventions.main(["tiny", "--rows", "2", "--seeds", "1", "--json", str(file)]) == 0
    assert "ieee: absent : not run, not installed" in capsys.readouterr().out
    record = decode(file.read_bytes())
    assert len(record.rows) == 4
    assert record.origin.packages["rlk-core"].digest == environment.digests()["rlk-core"]
    assert record.origin.command == "python -m rlk.bench.conventions tiny --rows 2 --seeds 1"
