# SPDX-License-Identifier: Apache-2.0
"""A patched model in a block of exact gradients: every norm, and nothing else, carries its sum."""

import torch

from rlk.compare import assert_same_bits
from rlk.exact_grad import ExactGradAccumulator
from rlk_qwen3next import patch, unpatch


def test_patch_model_in_a_block_carries_the_sums_of_all_norms(model, results):
    report = patch(model)
    expected = results(model)
    norms = {f"{site.path}.weight" for site in report.changed}
    sums = ExactGradAccumulator(model)
    assert set(sums.report().exact) == norms
    named = dict(model.named_parameters())
    with sums:
        inside = results(model)
        for name in norms:
            assert_same_bits(inside[name], torch.zeros_like(named[name]), f"{name} in the block")
    for name in expected.keys() - {"logits"}:
        assert_same_bits(named[name].grad, expected[name], name)
    assert_same_bits(inside["logits"], expected["logits"], "logits")
    unpatch(model)
    assert ExactGradAccumulator(model).report().exact == ()
