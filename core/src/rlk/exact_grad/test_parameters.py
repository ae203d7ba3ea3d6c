# SPDX-License-Identifier: Apache-2.0
"""The report: every parameter once, exact, or with the reason against it."""

from typing import ClassVar

import torch
from torch import nn

from rlk.exact_grad import ExactGradAccumulator
from rlk.test_support.exact_layouts import (
    EIGHT,
    WHOLE,
    WIDTH,
    Model,
    Scale,
    accumulated,
    assert_same_gradients,
    backward,
    gradients,
)


class Projection(nn.Module):
    """The parameters of a layer below it: one exact, one a chain."""

    exact_sums: ClassVar = {"linear.bias": "bias_sum"}
    chain_sums: ClassVar = {"linear.weight": "weight_chain"}
    bias_sum = weight_chain = None

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


def reasons(module):
    report = ExactGradAccumulator(module).report()
    return {p.name: p.reason for p in report.parameters}


def test_report_of_a_model_names_every_parameter_and_prints():
    report = ExactGradAccumulator(Model()).report()
    assert report.exact == ("first.weight", "second.weight")
    assert report.ordinary == ("factor",)
    assert str(report) == (
        "factor         ordinary: no operator of ours forms its gradient\n"
        "first.weight   exact\n"
        "second.weight  exact\n"
        "2 exact, 1 ordinary"
    )


def test_report_of_a_layer_below_the_module_tells_exact_and_chain_apart():
    assert reasons(nn.Sequential(Projection())) == {
        "0.linear.weight": "its gradient is a chain over rows, finished in every call",
        "0.linear.bias": "",
    }


def test_report_of_a_frozen_parameter_says_so():
    model = Model()
    model.first.weight.requires_grad_(False)
    assert reasons(model)["first.weight"] == "it requires no gradient"
    with ExactGradAccumulator(model):
        assert model.first.weight_sum is None
        assert model.second.weight_sum is not None


def test_report_of_a_parameter_that_others_use_too_names_them():
    model = Model()
    model.norm = nn.LayerNorm(WIDTH, bias=False)
    model.norm.weight = model.second.weight
    assert reasons(model)["second.weight"] == "norm uses it too"
    with ExactGradAccumulator(model):
        assert model.second.weight_sum is None
    alone = Scale()
    alone.register_parameter("twin", alone.weight)
    assert reasons(alone) == {"weight": "the module itself uses it too"}


def test_report_of_a_layer_that_was_replaced_claims_nothing():
    module = Projection()
    module.linear = nn.Identity()
    assert reasons(module) == {}
    module.linear = nn.Linear(WIDTH, WIDTH, bias=False)
    assert list(reasons(module)) == ["linear.weight"]
    with ExactGradAccumulator(module):
        assert module.bias_sum is None


def test_report_of_a_list_of_parameters_covers_those_alone():
    model = Model()
    sums = ExactGradAccumulator(model, parameters=[model.factor, model.second.weight])
    assert [p.name for p in sums.report().parameters] == ["factor", "second.weight"]
    with sums:
        assert model.first.weight_sum is None
        assert model.second.weight_sum is not None
        assert list(sums.state_dict()) == ["second.weight"]


def test_accumulator_of_several_lists_sums_each_parameter_once():
    model, expected = Model(), accumulated(WHOLE)
    lists = ([model.first.weight], iter(model.second.parameters()))
    blocks = [ExactGradAccumulator(model, parameters=chosen) for chosen in lists]
    with blocks[0], blocks[1]:
        backward(model, EIGHT)
    assert_same_gradients(gradients(model), expected)


def test_report_of_a_tied_weight_has_it_once():
    model = Model()
    model.first.weight = model.second.weight
    assert ExactGradAccumulator(model).report().exact == ("first.weight",)


def test_report_prints_nothing_but_the_count_of_a_module_without_parameters():
    assert str(ExactGradAccumulator(nn.Identity()).report()) == "0 exact, 0 ordinary"
    assert torch.is_grad_enabled()
