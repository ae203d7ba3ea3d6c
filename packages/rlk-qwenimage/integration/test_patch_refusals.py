# SPDX-License-Identifier: Apache-2.0
"""What patching leaves alone, and what a patched model refuses to compute."""

import diffusers
import pytest
import torch
from diffusers.models.normalization import AdaLayerNormContinuous, RMSNorm
from diffusers.models.transformers import transformer_qwenimage as theirs
from torch import nn

from rlk.compare import assert_same_bits
from rlk.errors import ArgumentError
from rlk_qwenimage import patch, unpatch

SITES = 18
BLOCK = "transformer_blocks.0"


class Adapter(nn.Module):
    """A layer around another, as adapters of low rank are."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x):
        return self.base_layer(x) + x.sum(-1, keepdim=True)


class DerivedBlock(theirs.QwenImageTransformerBlock):
    pass


class DerivedProcessor(theirs.QwenDoubleStreamAttnProcessor2_0):
    pass


def derive_block(model):
    model.transformer_blocks[0].__class__ = DerivedBlock


def derive_processor(model):
    model.transformer_blocks[0].attn.set_processor(DerivedProcessor())


def set_forward(model):
    model.transformer_blocks[0].img_norm2.forward = lambda x: x


def give_weight(model):
    model.transformer_blocks[0].txt_norm1 = nn.LayerNorm(48, eps=1e-6)


def replace_norm(model):
    model.transformer_blocks[0].txt_norm1 = nn.Identity()


def change_eps(model):
    model.transformer_blocks[0].txt_norm1.eps = 0.5


def adapt_modulation(model):
    model.transformer_blocks[0].img_mod[1] = Adapter(model.transformer_blocks[0].img_mod[1])


def replace_activation(model):
    model.transformer_blocks[0].img_mod[0] = nn.GELU()


def lengthen_modulation(model):
    model.transformer_blocks[0].img_mod.append(nn.Identity())


def drop_bias(model):
    model.transformer_blocks[0].txt_mod[1].bias = None


def adapt_output(model):
    model.norm_out.linear = Adapter(model.norm_out.linear)


def affine_output(model):
    model.norm_out = AdaLayerNormContinuous(48, 48)


def rms_output(model):
    model.norm_out = AdaLayerNormContinuous(48, 48, elementwise_affine=False, norm_type="rms_norm")


def drop_weight(model):
    model.txt_norm = RMSNorm(24, eps=1e-6, elementwise_affine=False)


def add_norm(model):
    model.extra = nn.LayerNorm(4)


LEFT = [
    (derive_block, BLOCK, "its class is derived from QwenImageTransformerBlock"),
    (
        derive_processor,
        f"{BLOCK}.attn.processor",
        "its class is derived from QwenDoubleStreamAttnProcessor2_0",
    ),
    (set_forward, BLOCK, "the forward of img_norm2 is set on the instance"),
    (give_weight, BLOCK, "txt_norm1 has a weight"),
    (
        replace_norm,
        BLOCK,
        "txt_norm1 is torch.nn.modules.linear.Identity, not LayerNorm",
    ),
    (change_eps, BLOCK, "its norms differ in eps"),
    (
        adapt_modulation,
        f"{BLOCK}.img_mod",
        f"its projection is {__name__}.Adapter, not Linear",
    ),
    (
        replace_activation,
        f"{BLOCK}.img_mod",
        "its activation is torch.nn.modules.activation.GELU, not SiLU",
    ),
    (lengthen_modulation, f"{BLOCK}.img_mod", "it is not a SiLU and a Linear"),
    (drop_bias, f"{BLOCK}.txt_mod", "its projection has no bias"),
    (
        adapt_output,
        "norm_out",
        f"its projection is {__name__}.Adapter, not Linear",
    ),
    (affine_output, "norm_out", "its norm has a weight"),
    (
        rms_output,
        "norm_out",
        "its norm is diffusers.models.normalization.RMSNorm, not LayerNorm",
    ),
    (drop_weight, "txt_norm", "it has no weight"),
    (add_norm, "extra", "there is no operator for a class of torch.nn.modules.normalization"),
]


@pytest.mark.parametrize(
    ("change", "path", "reason"), LEFT, ids=lambda v: getattr(v, "__name__", "")
)
def test_patch_site_that_cannot_be_computed_is_left_alone_with_the_reason(
    model, change, path, reason
):
    change(model)
    before = {p: type(m) for p, m in model.named_modules() if p.startswith(path)}
    report = patch(model)
    assert {site.path: site.reason for site in report.left} == {path: reason}
    assert len(report.changed) == (SITES if change is add_norm else SITES - 1)
    if path == BLOCK:
        norms = ("img_norm1", "img_norm2", "txt_norm1", "txt_norm2")
        before = {p: c for p, c in before.items() if p.removeprefix(f"{BLOCK}.") in ("", *norms)}
    assert before.items() <= {p: type(m) for p, m in model.named_modules()}.items()
    assert f"left alone: {reason}" in str(report)


@pytest.mark.skipif(diffusers.__version__ == "0.35.0", reason="needs a diffusers with zero_cond_t")
def test_patch_block_whose_tokens_are_modulated_by_an_index_is_left_alone(build, arguments, close):
    model = build(zero_cond_t=True)
    given = arguments(model)
    given["img_shapes"] = [[(1, 2, 4), (1, 1, 4)]] * 2
    before = model(**given).sample
    report = patch(model)
    reason = "its modulation differs from token to token (zero_cond_t)"
    assert {site.path: site.reason for site in report.left} == {
        "transformer_blocks.0": reason, "transformer_blocks.1": reason,
    }  # fmt: skip
    close(model(**given).sample, before)
    model.transformer_blocks[0].zero_cond_t = False
    patch(model)
    with pytest.raises(ArgumentError, match="modulate_index must be None in a patched model, got"):
        model(**given)


def test_patched_modulation_refuses_an_adapter_put_on_later_and_can_be_unpatched(model, results):
    adapt_modulation(model)
    expected = results(model)
    model.transformer_blocks[0].img_mod[1] = model.transformer_blocks[0].img_mod[1].base_layer
    patch(model)
    adapt_modulation(model)
    with pytest.raises(ArgumentError) as caught:
        results(model)
    assert str(caught.value) == (
        "Sequential: [1] must be the Linear that was patched, got "
        f"{__name__}.Adapter; unpatch the model before replacing its layers"
    )
    unpatch(model)
    for name, tensor in results(model).items():
        assert_same_bits(tensor, expected[name], name)


def test_patched_attention_refuses_real_tables(model):
    patch(model)
    rotate = type(model.transformer_blocks[0].attn.processor).__call__.__globals__[
        "apply_rotary_emb_qwen"
    ]
    with pytest.raises(ArgumentError, match="use_real must be False in a patched model, got True"):
        rotate(torch.zeros(1, 2, 3, 4), (torch.zeros(2, 4), torch.zeros(2, 4)))
