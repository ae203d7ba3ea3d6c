# SPDX-License-Identifier: Apache-2.0
"""The classes of other libraries that the survey measures compute the operator."""

import pytest

from rlk import registry
from rlk.survey.values import places, survey


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prior_art_of_diffusers_computes_the_operators(dtype):
    found = {}
    for operator in registry.declared_in("rlk_qwenimage"):
        place = places(operator, dtype, 21, seed=3)[0]
        if operator.name == "final_adaln_out":
            found[operator.name] = survey(place, "diffusers")
    (row,) = found.values()
    assert row.verdict == "measured", row.reason
    assert row.version
    assert row.rows_alone.keys() == {"out", "dx", "dtemb"}
