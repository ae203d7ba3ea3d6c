# SPDX-License-Identifier: Apache-2.0
"""The classes of other libraries that the survey measures compute the operator."""

import pytest

from rlk import registry
from rlk.bench.variants import peers_of
from rlk.survey.values import places, survey


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prior_art_of_transformers_computes_the_operators(dtype):
    found = {}
    for operator in registry.declared_in("rlk_qwen3next"):
        for peer in peers_of(operator):
            if peer.distribution == "transformers":
                place = places(operator, dtype, 21, seed=3)[0]
                found[operator.name] = survey(place, peer.name)
    plain = {"rms_norm", "rms_norm_vllm"}
    assert found.keys() == plain | {"qwen3_next_rms_norm", "rms_norm_gated"}
    for row in found.values():
        assert row.verdict == "measured", row.reason
        # Nothing of another library is wrong by itself; what it is, its record says.
        assert set(row.order_free) == {"dweight"}
