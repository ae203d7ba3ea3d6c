# SPDX-License-Identifier: Apache-2.0
"""Recorded hashes witness bits: they change with the bits version or not at all."""

import json

import pytest

from rlk.errors import RlkError
from rlk.gates import golden_hashes
from rlk.operator import FLOATS


def recorded(scale):
    return json.loads(golden_hashes.path(scale.operator()).read_text())


def other_bits(scale, **fields):
    """The same formula with every product one ulp higher."""

    def forward(x, weight):
        (y,) = scale.forward(x, weight)
        return (y.nextafter(y + 1) if y.element_size() == 4 else y,)

    return scale.operator(forward=forward, **fields)


def test_write_unchanged_bits_gives_the_same_file(scale):
    golden_hashes.write(scale.operator())
    first = recorded(scale)
    golden_hashes.write(scale.operator())
    assert recorded(scale) == first
    assert golden_hashes.stale(scale.operator()) is None
    assert {key.split("/")[0] for key in first["hashes"]} == set(FLOATS)
    assert {key.split("/")[2] for key in first["hashes"]} == {"y", "dx", "dweight"}


def test_inputs_cover_several_lengths_and_float32_parameters(scale):
    made = dict(golden_hashes.inputs(scale.operator(), "bfloat16"))
    assert {t.inputs["x"].shape[1] for t in made.values()} == {1, 8, 257, 1000}
    assert str(made["float32_parameters"].inputs["weight"].dtype) == "torch.float32"


def test_write_changed_bits_without_a_version_is_refused(scale):
    golden_hashes.write(scale.operator())
    first = recorded(scale)
    with pytest.raises(RlkError, match="scale: bits_version must rise when bits change, got 1"):
        golden_hashes.write(other_bits(scale))
    assert recorded(scale) == first
    assert "bits changed under bits version 1" in golden_hashes.stale(other_bits(scale))


def test_write_changed_bits_with_a_version_is_recorded(scale):
    golden_hashes.write(scale.operator())
    raised = other_bits(scale, bits_version=2)
    assert golden_hashes.stale(raised).startswith("hashes are of bits version 1, declared is 2")
    golden_hashes.write(raised)
    assert recorded(scale)["bits_version"] == 2
    assert golden_hashes.stale(raised) is None


@pytest.mark.parametrize(
    ("text", "word"),
    [(None, "no such file"), ("{}", "must be valid"), ("[", "must be valid")],
)
def test_load_bad_file_is_refused(scale, text, word):
    if text is not None:
        golden_hashes.path(scale.operator()).write_text(text)
    with pytest.raises(RlkError, match=word):
        golden_hashes.load(scale.operator())


def test_backend_equal_golden_is_held_against_its_hashes(scale):
    golden_hashes.write(scale.operator())
    assert {r.status for r in scale.records("backend_equal")} == {"passed"}
    failed = {
        r.tensor for r in scale.records("backend_equal", other_bits(scale)) if r.status == "failed"
    }
    assert failed == {"y"}


def test_backend_equal_old_bits_version_turns_every_record_red(scale):
    golden_hashes.write(scale.operator())
    records = scale.records("backend_equal", scale.operator(bits_version=2))
    assert {r.status for r in records} == {"failed"}
    assert all("run rlk bits --write scale" in r.reason for r in records)


def test_backend_equal_without_recorded_hashes_is_red(scale):
    (record,) = scale.records("backend_equal")
    assert (record.status, record.tensor) == ("failed", "")
    assert "no such file" in record.reason


def test_backend_equal_missing_key_is_red(scale):
    golden_hashes.write(scale.operator())
    document = recorded(scale)
    del document["hashes"]["float32/random/y"]
    golden_hashes.path(scale.operator()).write_text(json.dumps(document))
    failed = [r for r in scale.records("backend_equal") if r.status == "failed"]
    assert [(r.config, r.tensor) for r in failed] == [("random", "y")]
