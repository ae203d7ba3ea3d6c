# SPDX-License-Identifier: Apache-2.0
"""The manifest states the model's published facts, and those of the declarations."""

import json
from importlib.resources import files

import jsonschema
import pytest

import rlk_qwenimage
from rlk import registry
from rlk.errors import WorkloadError
from rlk.manifest import digest, json_schema, load_manifest

DOCUMENT = json.loads((files("rlk_qwenimage") / "manifest.json").read_bytes())
OPERATORS = {o.name: o for o in registry.declared_in(rlk_qwenimage.__name__)}


def manifest():
    return load_manifest(json.dumps(DOCUMENT).encode(), operators=set(OPERATORS))


def test_manifest_facts_equal_the_published_model():
    values = manifest().architecture.values
    assert [values["layers"], values["attention_heads"], values["attention_head_dim"]] == [
        60,
        24,
        128,
    ]
    assert values["hidden_size"] == values["attention_heads"] * values["attention_head_dim"]
    assert [values["joint_attention_dim"], values["in_channels"], values["out_channels"]] == [
        3584,
        64,
        16,
    ]
    assert not manifest().provenance.full_model_evidence


def test_manifest_sites_are_those_of_a_block_and_of_the_end():
    found = {o.name: {s.name: s.instances for s in o.sites} for o in manifest().operators}
    norms = ("img_norm1", "img_norm2", "txt_norm1", "txt_norm2")
    assert found == {
        "layer_norm_modulate": {**dict.fromkeys(norms, 60), "norm_out": 1},
        "adaln_mod_projection": {"img_mod": 60, "txt_mod": 60, "norm_out": 1},
        "final_adaln_out": {"norm_out": 1},
    }


@pytest.mark.parametrize("entry", manifest().operators, ids=lambda entry: entry.name)
def test_manifest_operator_agrees_with_its_declaration(entry):
    operator = OPERATORS[entry.name]
    symbol = "K" if "K" in operator.workloads[0].sizes else "N"
    widths = {workload.sizes[symbol] for workload in operator.workloads}
    assert {site.width for site in entry.sites} <= widths
    assert set(entry.scalars) == {scalar.name for scalar in operator.scalars}
    declared = {backend.name for backend in operator.backends}
    available = {"golden", "triton", "cuda"} & declared
    assert {n for n in available if getattr(entry.backends, n) == "declared"} == available


def test_manifest_published_schema_accepts_it():
    jsonschema.validate(DOCUMENT, json_schema())


def test_manifest_with_another_width_is_refused_by_path():
    changed = json.loads(json.dumps(DOCUMENT))
    changed["operators"][1]["sites"][0]["width"] = 64
    changed["sha256"] = digest(changed)
    with pytest.raises(WorkloadError, match=r"\$\.operators\[1\]\.sites\[0\]\.width must be"):
        load_manifest(json.dumps(changed).encode())
