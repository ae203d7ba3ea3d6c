# SPDX-License-Identifier: Apache-2.0
"""A small Qwen-Image transformer with random weights, and what it computes."""

import inspect

import pytest
import torch

from rlk.contract import load
from rlk.test_support.patched_models import Patching
from rlk_qwenimage import patch, unpatch

GRID = (1, 3, 4)
TEXT = 5
SIZES = {
    "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 3, "in_channels": 8,
    "out_channels": 2, "joint_attention_dim": 24, "axes_dims_rope": (4, 6, 6),
}  # fmt: skip


def build_model(**options):
    """The model in FP32, with weights and biases away from 1 and 0."""
    from diffusers import QwenImageTransformer2DModel

    torch.manual_seed(2026)
    model = QwenImageTransformer2DModel(**{**SIZES, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) / 8)
    return model


def inputs_of(model, batch=2, grid=GRID, text=TEXT):
    """Arguments of the forward of a model."""
    device, dtype = model.device, model.dtype
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(batch, *shape, generator=generator).to(device, dtype)

    frames, height, width = grid
    arguments = {
        "hidden_states": normal(frames * height * width, model.config.in_channels),
        "encoder_hidden_states": normal(text, model.config.joint_attention_dim),
        "encoder_hidden_states_mask": torch.ones(batch, text, dtype=torch.int64, device=device),
        "timestep": torch.linspace(0.2, 0.9, batch, device=device),
        "img_shapes": [[grid]] * batch,
    }
    if "txt_seq_lens" in inspect.signature(model.forward).parameters:
        arguments["txt_seq_lens"] = [text] * batch
    return arguments


def outputs_and_gradients(model, **options):
    """The sample and every gradient of one forward and backward."""
    model.zero_grad()
    sample = model(**inputs_of(model, **options)).sample
    sample.backward(torch.linspace(-1, 1, sample.numel()).reshape(sample.shape).to(sample))
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"sample": sample.detach(), **gradients}


def assert_close(actual, expected, judgment="forward_accuracy", dtype=None):
    """Element by element within the contract's ceiling of a reduction in this dtype."""
    bound = load().tolerance(judgment, "reduction", dtype or expected.dtype)
    torch.testing.assert_close(actual, expected, atol=bound.atol, rtol=bound.rtol)


@pytest.fixture
def close():
    return assert_close


@pytest.fixture
def build():
    return build_model


@pytest.fixture
def arguments():
    return inputs_of


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
