# SPDX-License-Identifier: Apache-2.0
"""The manifest states the model's published facts, and no damaged copy of it loads."""

import copy
import json
from importlib.resources import files

import jsonschema
import pytest

from rlk.errors import WorkloadError
from rlk.manifest import digest, json_schema, load_manifest

DOCUMENT = json.loads((files("rlk_qwen3next") / "manifest.json").read_bytes())
OPERATORS = {"rms_norm", "qwen3_next_rms_norm", "rms_norm_gated", "rms_norm_residual"}
DELETE = object()


def broken(path, value, reseal=True):
    """A copy with the value at a key path replaced or deleted, and by default a fitting digest."""
    document = copy.deepcopy(DOCUMENT)
    *parents, last = path
    place = document
    for key in parents:
        place = place[key]
    if value is DELETE:
        del place[last]
    else:
        place[last] = value
    if reseal:
        document["sha256"] = digest(document)
    return json.dumps(document).encode()


def refusal(text):
    with pytest.raises(WorkloadError) as caught:
        load_manifest(text, operators=OPERATORS)
    return str(caught.value)


def test_manifest_facts_equal_the_published_model():
    manifest = load_manifest(json.dumps(DOCUMENT).encode(), operators=OPERATORS)
    values = manifest.architecture.values
    assert manifest.model.revision == "9c7f2fbe84465e40164a94cc16cd30b6999b0cc7"
    assert [values["layers"], values["hidden_size"], values["intermediate_size"]] == [
        48,
        2048,
        5120,
    ]
    assert [values["attention_heads"], values["kv_heads"], values["head_dim"]] == [16, 2, 256]
    assert [values["linear_key_heads"], values["linear_value_heads"]] == [16, 32]
    assert [values["linear_key_head_dim"], values["linear_value_head_dim"]] == [128, 128]
    assert [values["vocab_size"], values["experts"], values["experts_per_token"]] == [
        151936,
        512,
        10,
    ]
    assert len(manifest.weights.shards) == 41
    assert manifest.weights.files_total_bytes == 162_659_161_528
    assert manifest.weights.index_total_bytes == 162_649_725_440
    assert not manifest.provenance.full_model_evidence


def test_manifest_short_matrix_has_thirteen_configurations():
    manifest = load_manifest(json.dumps(DOCUMENT).encode())
    assert len(manifest.cases) == 13
    assert manifest.fixtures[0].sample_lengths == (11, 16, 13, 19)


def test_manifest_published_schema_accepts_it():
    jsonschema.validate(DOCUMENT, json_schema())


GATED = ("operators", 2, "sites", 0)
VALUES = ("architecture", "values")


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        pytest.param(("model", "revision"), "main", "$.model.revision", id="revision-not-hex"),
        pytest.param(("model", "name"), "x", "$.model.name", id="unknown-key"),
        pytest.param(("comment",), "x", "$.comment", id="unknown-top-level-key"),
        pytest.param(("seed",), 1, "$.seed", id="misplaced-key"),
        pytest.param(("stochastic", "seed"), DELETE, "$.stochastic.seed", id="missing-key"),
        pytest.param(("chain",), DELETE, "$.chain", id="missing-top-level-key"),
        pytest.param(("cases", 1, "chunk"), None, "$.cases[1].chunk", id="explicit-null"),
        pytest.param(("stochastic", "seed"), "2026", "$.stochastic.seed", id="string-for-int"),
        pytest.param(("stochastic", "seed"), True, "$.stochastic.seed", id="bool-for-int"),
        pytest.param(("stochastic", "dropout"), 0.5, "$.stochastic.dropout", id="dropout"),
        pytest.param(
            ("execution", "dtypes", 0), "float16", "$.execution.dtypes[0]", id="float16-execution"
        ),
        pytest.param(
            ("execution", "dtypes", 1), "bfloat16", "$.execution.dtypes[1]", id="dtype-twice"
        ),
        pytest.param(("execution", "tf32"), "on", "$.execution.tf32", id="tf32"),
        pytest.param(
            ("weights", "shards", 0, "sha256"), "xyz", "$.weights.shards[0].sha256", id="shard-hash"
        ),
        pytest.param(
            ("weights", "shards", 1, "name"),
            "model-00001-of-00041.safetensors",
            "$.weights.shards[1].name",
            id="shard-twice",
        ),
        pytest.param(
            ("weights", "shards", 1, "name"),
            "model-00003-of-00040.safetensors",
            "$.weights.shards[1].name",
            id="shard-of-another-split",
        ),
        pytest.param(("weights", "shards", 40), DELETE, "$.weights.shard_count", id="shard-lost"),
        pytest.param(
            ("weights", "files_total_bytes"), 81 * 10**9, "$.weights.index_total_bytes", id="total"
        ),
        pytest.param(
            ("weights", "shards", 0, "size"), 10**12, "$.weights.files_total_bytes", id="shard-size"
        ),
        pytest.param((*VALUES, "layers"), 4, "$.architecture.fingerprint", id="fewer-layers"),
        pytest.param((*VALUES, "head_dim"), DELETE, "$.architecture.fingerprint", id="lost-value"),
        pytest.param(
            (*VALUES, "experts"), [512], "$.architecture.values.experts", id="value-is-a-list"
        ),
        pytest.param(("operators", 0, "sites", 0, "width"), 1024, "sites[0].width", id="decoder"),
        pytest.param(("operators", 1, "sites", 3, "width"), 128, "sites[3].width", id="q-norm"),
        pytest.param((*GATED, "width"), 256, "$.operators[2].sites[0].width", id="gated-width"),
        pytest.param((*GATED, "width_from"), "depth", "sites[0].width_from", id="unknown-source"),
        pytest.param((*GATED, "rows_per_token"), 16, "sites[0].rows_per_token", id="gated-rows"),
        pytest.param((*GATED, "instances"), 48, "sites[0].instances", id="gated-instances"),
        pytest.param(("operators", 2), DELETE, "$.provenance.scope", id="operator-out-of-scope"),
        pytest.param(
            ("operators", 1, "name"), "rms_norm", "$.operators[1].name", id="operator-twice"
        ),
        pytest.param(
            ("operators", 0, "backends", "cuda"), "maybe", "$.operators[0].backends.cuda", id="cuda"
        ),
        pytest.param(
            ("operators", 0, "scalars", "eps"), [1], "$.operators[0].scalars.eps", id="scalar"
        ),
        pytest.param(("fixtures", 0, "tokens"), 60, "$.fixtures[0].tokens", id="token-total"),
        pytest.param(("fixtures", 0, "sample_lengths", 2), 0, "sample_lengths[2]", id="no-tokens"),
        pytest.param(("cases", 2, "fixture"), "other", "$.cases[2].fixture", id="no-such-fixture"),
        pytest.param(("cases", 2, "samples", 0), 4, "$.cases[2].samples[0]", id="no-such-sample"),
        pytest.param(("cases", 2, "samples"), [0, 1], "$.cases[2].samples", id="two-singletons"),
        pytest.param(
            ("cases", 0, "samples"), [0, 1, 1], "$.cases[0].samples[2]", id="sample-twice"
        ),
        pytest.param(("cases", 10, "samples"), [0, 1, 2, 3], "$.cases[10].samples", id="identity"),
        pytest.param(("cases", 11, "pad_to"), 18, "$.cases[11].pad_to", id="padding-too-short"),
        pytest.param(("cases", 0, "pad_to"), 20, "$.cases[0].pad_to", id="padding-not-used"),
        pytest.param(("cases", 1, "chunk"), DELETE, "$.cases[1].chunk", id="chunk-missing"),
        pytest.param(("cases", 3, "id"), "canonical", "$.cases[3].id", id="case-twice"),
    ],
)
def test_manifest_mutation_is_refused_by_path(path, value, named):
    message = refusal(broken(path, value))
    assert message.startswith("manifest: $")
    assert named in message.split(" must ")[0]


def test_manifest_consistently_shrunk_architecture_is_refused_at_its_sites():
    values = {**DOCUMENT["architecture"]["values"], "layers": 4}
    shrunk = {"values": values, "fingerprint": digest(values)}
    message = refusal(broken(("architecture",), shrunk))
    assert "$.operators[0].sites[0].instances must be layers = 4, got 48" in message


def test_manifest_change_without_a_new_digest_is_refused():
    assert "$.sha256 must be" in refusal(broken(("workload_id",), "other", reseal=False))
    assert "$.sha256 must fit" in refusal(broken(("sha256",), "0x12", reseal=False))


def test_manifest_repeated_key_is_refused_by_path():
    text = json.dumps(DOCUMENT).replace('"seed":', '"seed": 1, "seed":', 1).encode()
    assert "$.stochastic.seed must be" in refusal(text)


def test_manifest_uncovered_operator_is_refused_by_name():
    text = json.dumps(DOCUMENT).encode()
    with pytest.raises(WorkloadError, match=r"\$\.operators must cover layer_norm"):
        load_manifest(text, operators=OPERATORS | {"layer_norm"})
