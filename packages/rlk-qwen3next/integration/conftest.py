# SPDX-License-Identifier: Apache-2.0
"""A small Qwen3-Next with random weights, and what it computes."""

import pytest
import torch

from rlk.test_support.patched_models import Patching
from rlk_qwen3next import patch, unpatch


def build_model(**options):
    """The model in FP32, with norm weights away from their initial 0 and 1."""
    # Not above: transformers may import triton, and a conftest is read before our plugin says how.
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(2026)
    config = Qwen3NextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, rms_norm_eps=1e-5, **options,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_()
    return model


def outputs_and_gradients(model, ids=None):
    """Logits and every gradient of one forward and backward."""
    device = next(model.parameters()).device
    ids = torch.arange(46).reshape(2, 23) if ids is None else ids
    ids = ids.to(device)
    model.zero_grad()
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": output.logits.detach(), **gradients}


@pytest.fixture
def build():
    return build_model


@pytest.fixture
def results():
    return outputs_and_gradients


@pytest.fixture
def model():
    return build_model()


@pytest.fixture
def patching():
    """Our functions and this model."""
    return Patching(patch, unpatch, build_model, outputs_and_gradients)
