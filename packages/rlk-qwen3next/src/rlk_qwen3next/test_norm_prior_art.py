# SPDX-License-Identifier: Apache-2.0
"""Norms of libraries that are not here, in our words: the formula, and each named once."""

import pytest
import torch

from rlk.bench.variants import conventions, peers_of
from rlk.compare import assert_same_bits
from rlk_qwen3next.conftest import NEEDS_INTERPRETER, OPERATORS
from rlk_qwen3next.qwen3_next_rms_norm import prior_art as centred
from rlk_qwen3next.rms_norm import prior_art as plain
from rlk_qwen3next.rms_norm_gated import prior_art as gated

# 2^k: squares of 256, their mean and its root are exact.
X = torch.exp2(torch.arange(-4, 5).float())[:, None].expand(9, 256).contiguous()
WEIGHT = torch.linspace(-2, 2, 256)


@NEEDS_INTERPRETER
def test_reproduced_plain_norm_of_equal_columns_is_the_weight():
    y = plain.like_sglang({"eps": 0.0, "weight_offset": 0.0})(X, WEIGHT)
    assert_same_bits(y, WEIGHT.expand(9, 256).contiguous(), "y")


@NEEDS_INTERPRETER
def test_reproduced_gated_norm_of_equal_columns_is_the_weight_by_silu(monkeypatch):
    # 1 processor: 4 rows of a program, and the last one has fewer. silu(64) is 64 in FP32.
    class Properties:
        multi_processor_count = 1

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    call = gated.like_vllm({"eps": 0.0, "weight_offset": 0.0, "activation": "silu"})
    y = call(X, torch.full_like(X, 64.0), WEIGHT)
    assert_same_bits(y, (WEIGHT * 64).expand(9, 256).contiguous(), "y")


def test_reproduced_zero_centred_norm_of_equal_columns_is_one_and_the_weight():
    with torch.compiler.set_stance("force_eager"):
        y = centred.like_vllm({"eps": 0.0})(X, WEIGHT)
    assert_same_bits(y, (1 + WEIGHT).expand(9, 256).contiguous(), "y")


def test_functions_without_an_offset_or_another_activation_refuse_them():
    with pytest.raises(ValueError, match="it has no offset"):
        plain.like_sglang({"eps": 0.0, "weight_offset": 1.0})
    with pytest.raises(ValueError, match="it has silu alone"):
        gated.like_vllm({"eps": 0.0, "weight_offset": 0.0, "activation": "sigmoid"})


@pytest.mark.parametrize("name", OPERATORS)
def test_survey_of_every_norm_names_other_conventions_once(name):
    operator = OPERATORS[name]
    names = [peer.name for peer in peers_of(operator)]
    assert len(set(names)) == len(names) >= 4
    assert {peer.name for peer in conventions(operator)} <= set(names)
    assert "torch.compile, sum unrounded" in names or not name.startswith("rms_norm_residual")
