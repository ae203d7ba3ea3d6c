# SPDX-License-Identifier: Apache-2.0
"""A patched model in a block of exact gradients: biases of modulations and RMS norms carry sums."""

import torch

from rlk.compare import assert_same_bits
from rlk.exact_grad import ExactGradAccumulator
from rlk_qwenimage import patch, unpatch

CHAIN = "its gradient is a chain over rows, finished in every call"


def test_patch_model_in_a_block_carries_the_sums_of_norms_and_modulations(model, results):
    report = patch(model)
    expected = results(model)
    sums = ExactGradAccumulator(model)
    exact, reasons = sums.report().exact, {p.name: p.reason for p in sums.report().parameters}
    named = dict(model.named_parameters())
    modulations = [n for n in named if "_mod." in n or n.startswith("norm_out.")]
    norms = [f"{s.path}.weight" for s in report.changed if s.class_name == "RMSNorm"]
    assert modulations
    assert norms
    assert set(exact) == {n for n in modulations if n.endswith("bias")} | set(norms)
    assert {n for n, r in reasons.items() if r == CHAIN} == set(modulations) - set(exact)
    with sums:
        inside = results(model)
        for name in exact:
            assert_same_bits(inside[name], torch.zeros_like(named[name]), f"{name} in the block")
    for name in exact:
        assert_same_bits(named[name].grad, expected[name], name)
    assert_same_bits(inside["sample"], expected["sample"], "sample")
    sums = ExactGradAccumulator(model, continue_chains=True)
    assert set(sums.report().chain) == set(modulations) - set(exact)
    with sums:
        results(model)
    for name in modulations:
        assert_same_bits(named[name].grad, expected[name], f"{name} with chains")
    unpatch(model)
    assert ExactGradAccumulator(model).report().exact == ()
