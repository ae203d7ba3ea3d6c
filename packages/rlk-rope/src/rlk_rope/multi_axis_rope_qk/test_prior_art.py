# SPDX-License-Identifier: Apache-2.0
"""Two calls compute what one launch for query and key does."""

from types import SimpleNamespace

import pytest
import torch

import rlk_rope
from rlk.bench import variants
from rlk.compare import assert_same_bits
from rlk.errors import BackendError
from rlk_rope import multi_axis_rope, multi_axis_rope_qk
from rlk_rope.conftest import NEEDS_INTERPRETER
from rlk_rope.multi_axis_rope_qk import prior_art

NAMES = [peer.name for peer in prior_art.PEERS]
TOLD = {"interleaved": False, "rounding": "separate", "rotary_dim": 4}


def results(function, q, k, cos, sin, **options):
    """(q_out, k_out, dq, dk), the outputs taken as their own upstream gradients."""
    leaves = [t.detach().requires_grad_() for t in (q, k)]
    outputs = function(*leaves, cos, sin, **options)
    upstream = [t.detach() for t in outputs]
    return *upstream, *torch.autograd.grad(outputs, leaves, upstream)


@pytest.fixture
def batch(rope):
    return rope.normal(1, 9, 3, 6), rope.normal(1, 9, 1, 6, seed=1), *rope.tables(1, 9, 2)


@pytest.mark.parametrize("name", ["cuda, two calls", "triton, two calls"])
def test_two_calls_of_ours_have_the_bits_of_one_launch(batch, monkeypatch, name):
    peer = prior_art.PEERS[NAMES.index(name)]
    chosen = []

    def on_golden(q, *rest, backend, **options):
        chosen.append(backend)
        return multi_axis_rope(q, *rest, backend="golden", **options)

    monkeypatch.setattr(rlk_rope, "multi_axis_rope", on_golden)
    willing = SimpleNamespace(choose=lambda operator, device, backend: None)
    monkeypatch.setattr(variants, "dispatch", willing)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = results(peer.make(TOLD), *batch)
    assert peer.ours
    assert chosen == [name.partition(",")[0]] * 2
    for actual, wanted in zip(found, results(multi_axis_rope_qk, *batch, **TOLD), strict=True):
        assert_same_bits(actual, wanted)


@NEEDS_INTERPRETER
def test_two_calls_of_the_reproduced_schedule_have_the_bits_of_one_launch(batch):
    peer = prior_art.PEERS[NAMES.index("reproduced, no contraction, twice")]
    found = results(peer.make(TOLD), *batch)
    assert not peer.ours
    for actual, wanted in zip(found, results(multi_axis_rope_qk, *batch, **TOLD), strict=True):
        assert_same_bits(actual, wanted)


def test_liger_has_no_adjacent_pairs():
    with pytest.raises(BackendError, match="half-split pairs alone"):
        prior_art.LIGER.make({**TOLD, "interleaved": True})
