# SPDX-License-Identifier: Apache-2.0
"""The manifest states the model's published facts, and those of the declarations."""

import json
from importlib.resources import files

import jsonschema
import pytest

from rlk.errors import WorkloadError
from rlk.manifest import digest, json_schema, load_manifest
from rlk_rope.multi_axis_rope.operator import OPERATOR as ONE
from rlk_rope.multi_axis_rope_qk.operator import OPERATOR as TWO

DOCUMENT = json.loads((files("rlk_rope") / "manifest.json").read_bytes())
OPERATORS = {operator.name: operator for operator in (ONE, TWO)}


def test_manifest_facts_equal_the_published_model():
    manifest = load_manifest(json.dumps(DOCUMENT).encode(), operators=set(OPERATORS))
    values = manifest.architecture.values
    assert [values["layers"], values["attention_heads"], values["attention_head_dim"]] == [
        60,
        24,
        128,
    ]
    axes = [values[f"rope_axis_{axis}"] for axis in ("frame", "height", "width")]
    assert axes == [16, 56, 56]
    assert sum(axes) == values["attention_head_dim"]
    assert values["hidden_size"] == values["attention_heads"] * values["attention_head_dim"]
    assert not manifest.provenance.full_model_evidence


def test_manifest_sites_are_workloads_of_their_operators():
    manifest = load_manifest(json.dumps(DOCUMENT).encode())
    for entry in manifest.operators:
        operator = OPERATORS[entry.name]
        sizes = [(w.sizes["H"], w.sizes["D"]) for w in operator.workloads]
        for site in entry.sites:
            assert (site.rows_per_token, site.width) in sizes
        assert set(entry.scalars) == {s.name for s in operator.scalars}


def test_manifest_published_schema_accepts_it():
    jsonschema.validate(DOCUMENT, json_schema())


def test_manifest_with_another_width_is_refused_by_path():
    changed = json.loads(json.dumps(DOCUMENT))
    changed["operators"][1]["sites"][0]["width"] = 64
    changed["sha256"] = digest(changed)
    with pytest.raises(WorkloadError, match=r"\$\.operators\[1\]\.sites\[0\]\.width must be"):
        load_manifest(json.dumps(changed).encode())
