# SPDX-License-Identifier: Apache-2.0
"""The contract is the published table, strict, and in step with its schema."""

import json
from importlib.resources import files

import jsonschema
import msgspec
import pytest
import torch

from rlk.contract import AccuracyBound, Contract, json_schema, load
from rlk.errors import ArgumentError

DOCUMENT = json.loads((files("rlk") / "contract" / "contract.json").read_bytes())

# The published ceilings, copied by hand: (judgment, class) -> (atol, rtol) of FP32, BF16, FP16.
PUBLISHED = {
    ("forward_accuracy", "elementwise"): ((1e-5, 1e-5), (2e-2, 1.6e-2), (1e-3, 1e-3)),
    ("forward_accuracy", "reduction"): ((1e-4, 1e-4), (5e-2, 2e-2), (1e-3, 1e-3)),
    ("gradient_accuracy", "elementwise"): ((1e-5, 1e-5), (2e-2, 1.6e-2), (1e-3, 1e-3)),
    ("gradient_accuracy", "reduction"): ((1e-4, 1e-4), (1e-1, 2e-2), (1e-3, 1e-3)),
    # Products are sums, of more terms: the ceiling of other reductions.
    ("forward_accuracy", "product"): ((1e-4, 1e-4), (5e-2, 2e-2), (1e-3, 1e-3)),
    ("gradient_accuracy", "product"): ((1e-4, 1e-4), (1e-1, 2e-2), (1e-3, 1e-3)),
    ("forward_invariance", "elementwise"): ((0, 0), (0, 0), (0, 0)),
    ("gradient_invariance", "reduction"): ((0, 0), (0, 0), (0, 0)),
}


@pytest.mark.parametrize(("judgment", "operator_class"), PUBLISHED)
def test_ceilings_every_dtype_equal_the_published_table(judgment, operator_class):
    for dtype, pair in zip(
        ("float32", "bfloat16", "float16"), PUBLISHED[judgment, operator_class], strict=True
    ):
        bound = load().tolerance(judgment, operator_class, dtype)
        assert (bound.atol, bound.rtol) == pair


def test_low_precision_outputs_always_demand_the_published_fraction():
    for judgment in ("forward_accuracy", "gradient_accuracy"):
        for operator_class in ("elementwise", "reduction"):
            for dtype in ("bfloat16", "float16"):
                bound = load().accuracy(judgment, operator_class, dtype)
                assert bound.correctly_rounded >= 0.999


def test_tolerance_torch_dtype_equals_its_name():
    contract = load()
    assert contract.tolerance("forward_accuracy", "reduction", torch.bfloat16) == (
        contract.tolerance("forward_accuracy", "reduction", "bfloat16")
    )


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("speed", "reduction", "float32"), "judgment"),
        (("forward_accuracy", "gemm", "float32"), "operator_class"),
        (("forward_invariance", "gemm", "float32"), "operator_class"),
        (("forward_accuracy", "reduction", "float64"), "dtype"),
    ],
)
def test_tolerance_unknown_key_names_the_argument(arguments, word):
    with pytest.raises(ArgumentError, match=f"contract: {word} must be one of .*, got '"):
        load().tolerance(*arguments)


def test_accuracy_invariance_judgment_is_refused():
    with pytest.raises(ArgumentError, match="judgment must be about accuracy"):
        load().accuracy("forward_invariance", "reduction", "float32")
    assert isinstance(load().accuracy("forward_accuracy", "reduction", "float32"), AccuracyBound)


def test_schema_file_always_matches_the_structs():
    published = json.loads((files("rlk") / "contract" / "contract.schema.json").read_bytes())
    assert published == json_schema()
    jsonschema.Draft202012Validator.check_schema(published)
    jsonschema.validate(DOCUMENT, published)


@pytest.mark.parametrize("key", ["atol", "max_ulp_at_rms", "correctly_rounded"])
def test_contract_missing_number_is_refused(key):
    document = json.loads(json.dumps(DOCUMENT))
    del document["judgments"]["forward_accuracy"]["reduction"]["bfloat16"][key]
    with pytest.raises(msgspec.ValidationError, match=key):
        msgspec.convert(document, Contract)


def test_contract_unknown_key_is_refused():
    document = json.loads(json.dumps(DOCUMENT))
    document["judgments"]["forward_invariance"]["all"]["float32"]["relaxed"] = True
    with pytest.raises(msgspec.ValidationError, match="relaxed"):
        msgspec.convert(document, Contract)
