# SPDX-License-Identifier: Apache-2.0
"""The manifest loader, on a small model that exists nowhere."""

import copy
import hashlib
import json
from importlib.resources import files

import jsonschema
import msgspec
import pytest

from rlk.errors import WorkloadError
from rlk.manifest import digest, json_schema, load_manifest, main

VALUES = {"layers": 2, "width": 8, "heads": 4, "eps": 0.5}
SITE = {
    "name": "block",
    "width": 8,
    "width_from": "width",
    "rows_per_token": 4,
    "rows_per_token_from": "heads",
    "instances": 2,
    "instances_from": "layers",
}
ROLES = {"accuracy": "oracle", "bits": "golden", "invariance": "candidate"}
BACKENDS = {"golden": "declared", "triton": "declared", "cuda": "missing_required"}
SHARD = {"name": "toy.safetensors", "sha256": "a" * 64, "size": 10}
PAIR = {"fixture": "pair", "samples": [0, 1]}
DOCUMENT = {
    "schema": "rlk/workload-1",
    "workload_id": "toy",
    "model": {"id": "toy", "revision": "0" * 40},
    "architecture": {"values": VALUES, "fingerprint": digest(VALUES)},
    "weights": {
        "shard_count": 1,
        "files_total_bytes": 10,
        "index_total_bytes": 9,
        "shards": [SHARD],
    },
    "execution": {
        "dtypes": ["bfloat16"],
        "accumulation": "float32",
        "tf32": "off",
        "fast_math": "off",
    },
    "stochastic": {"seed": 0, "dropout": 0},
    "chain": {"loss_reduction": "sum", "comparison_roles": ROLES},
    "provenance": {
        "full_model_evidence": False,
        "weights": "synthetic",
        "scope": ["fold"],
        "boundary": "nothing but this test",
    },
    "operators": [
        {"name": "fold", "scalars": {"eps": 0.5}, "backends": BACKENDS, "sites": [SITE]},
    ],
    "fixtures": [{"id": "pair", "sample_lengths": [3, 2], "tokens": 5}],
    "cases": [
        {"id": "canonical", "transform": "canonical", **PAIR},
        {"id": "padded", "transform": "left_padded", "pad_to": 3, **PAIR},
    ],
}


@pytest.fixture
def document():
    return sealed(copy.deepcopy(DOCUMENT))


def sealed(document):
    """The document with the digest that belongs to it, by the published rule."""
    body = {key: value for key, value in document.items() if key != "sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return {**body, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def encoded(document):
    return json.dumps(document).encode()


def test_load_well_formed_document_returns_its_facts(document):
    manifest = load_manifest(encoded(document), operators={"fold"})
    assert manifest.operator("fold").sites[0].width == 8
    assert manifest.fixtures[0].sample_lengths == (3, 2)
    with pytest.raises(AttributeError):
        manifest.workload_id = "other"


def test_load_path_equals_bytes(document, tmp_path):
    path = tmp_path / "manifest.json"
    path.write_bytes(encoded(document))
    assert load_manifest(path) == load_manifest(encoded(document))


def test_digest_ignores_key_order_and_spacing(document):
    reordered = dict(reversed(document.items()))
    text = json.dumps(reordered, indent=4).encode()
    assert load_manifest(text).sha256 == document["sha256"]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (b"", "$"),
        (b"[]", "$"),
        (b"\xff", "$"),
        (b'{"model": {"id": "a", "id": "b"}}', "$.model.id"),
        (b'{"model": {"id": null}}', "$.model.id"),
        (b'{"cases": [{"chunk": NaN}]}', "$.cases[0].chunk"),
        (b'{"cases": [1, Infinity]}', "$.cases[1]"),
    ],
)
def test_load_text_other_readers_accept_is_refused_by_path(text, path):
    with pytest.raises(WorkloadError) as caught:
        load_manifest(text)
    assert f"manifest: {path} must be" in str(caught.value)


def test_load_missing_file_is_refused(tmp_path):
    with pytest.raises(WorkloadError) as caught:
        load_manifest(tmp_path / "absent.json")
    path = str(tmp_path / "absent.json")
    expected = f"manifest: the file must be readable, got {path!r} (No such file or directory)"
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("text", "got"),
    [
        (b'{"a": ' + b"[" * 100_000, "got too deep a nesting"),
        (b'{"a": "\\ud800"}', "got a lone surrogate in a string"),
        (b'{"\\udfff": 1}', "got a lone surrogate in a string"),
        ('{"a": 1}'.encode("utf-16"), "in UTF-8, got another encoding"),
        ('{"a": 1}'.encode("utf-16-le"), "got Expecting property name"),
        ('{"a": 1}'.encode("utf-8-sig"), "got Unexpected UTF-8 BOM"),
    ],
)
def test_load_nesting_and_encodings_beyond_plain_json_are_refused(text, got):
    with pytest.raises(WorkloadError, match=rf"\$ must be readable JSON.*{got}"):
        load_manifest(text)


def test_load_sizes_that_do_not_add_up_are_refused(document):
    document["weights"]["shards"][0]["size"] = 11
    with pytest.raises(WorkloadError, match=r"\$\.weights\.files_total_bytes must be 11"):
        load_manifest(encoded(sealed(document)))


def test_load_size_without_a_source_is_refused(document):
    del document["operators"][0]["sites"][0]["rows_per_token_from"]
    with pytest.raises(WorkloadError, match=r"sites\[0\]\.rows_per_token_from must be named"):
        load_manifest(encoded(sealed(document)))


def test_load_operator_outside_the_callers_list_is_refused(document):
    with pytest.raises(WorkloadError, match=r"\$\.operators must cover tree, got fold"):
        load_manifest(encoded(document), operators={"fold", "tree"})
    with pytest.raises(WorkloadError, match=r"\$\.operators\[0\]\.name must be one of"):
        load_manifest(encoded(document), operators=set())


def test_schema_file_always_matches_the_structs(document):
    published = json.loads((files("rlk") / "manifest.schema.json").read_bytes())
    assert published == json_schema()
    jsonschema.Draft202012Validator.check_schema(published)
    jsonschema.validate(document, published)


def test_schema_explicit_null_is_refused_as_by_the_loader(document):
    broken = copy.deepcopy(document)
    broken["cases"][0]["chunk"] = None
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, json_schema())


def test_command_stale_digest_exits_2_and_write_repairs_it(document, tmp_path, capsys):
    path = tmp_path / "manifest.json"
    document["architecture"]["values"]["eps"] = 0.25
    path.write_bytes(encoded(document))
    with pytest.raises(SystemExit) as caught:
        main([str(path)])
    assert caught.value.code == 2
    assert "$.sha256" in capsys.readouterr().err
    main([str(path), "--write"])
    assert capsys.readouterr().out.strip() == msgspec.json.decode(path.read_bytes())["sha256"]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("{}", "$.schema"),
        ('{"architecture": 3}', "$."),
        ("[", "$ must be readable JSON"),
        (None, "the file must be readable, got '/"),
    ],
)
def test_command_write_of_what_is_no_manifest_exits_2_with_one_sentence(
    tmp_path, capsys, text, place
):
    path = tmp_path / "manifest.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as caught:
        main([str(path), "--write"])
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(f"manifest: {place}")
    assert told.count("\n") == 1
