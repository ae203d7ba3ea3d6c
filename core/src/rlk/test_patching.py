# SPDX-License-Identifier: Apache-2.0
"""Changing the class of a module, and reporting it. The packages try it on real models."""

import sys
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import ClassVar

import pytest
import torch
from torch import nn

from rlk.errors import ArgumentError, PlatformError
from rlk.patching import (
    PatchReport,
    change_class,
    exchange,
    has_other_forward,
    own_class,
    require_release,
)


class Doubled(nn.Identity):
    def forward(self, x):
        return 2 * x


@dataclass(frozen=True)
class Place:
    header: ClassVar[tuple[str, ...]] = ("site", "eps")
    path: str
    eps: float | None
    reason: str = ""

    def row(self):
        return self.path, self.eps


def test_change_class_there_and_back_computes_the_one_and_the_other():
    module, x = nn.Identity(), torch.ones(2)
    change_class(module, nn.Identity, Doubled)
    assert (own_class(module), module(x).tolist()) == (Doubled, [2.0, 2.0])
    change_class(module, Doubled, nn.Identity)
    assert (own_class(module), module(x).tolist()) == (nn.Identity, [1.0, 1.0])


def test_change_class_forward_bound_to_the_instance_follows():
    module = nn.Identity()
    module.forward = MethodType(nn.Identity.forward, module)
    assert not has_other_forward(module)
    change_class(module, nn.Identity, Doubled)
    assert module(torch.ones(1)).item() == 2.0


def test_has_other_forward_only_for_one_that_is_not_of_the_class():
    module = nn.Identity()
    assert not has_other_forward(module)
    module.forward = lambda x: -x
    assert has_other_forward(module)


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("none", False), ("1.1.9", False), ("1.2.0", True), ("1.5.9", True),
        ("1.6.0", False), ("1.6.0.dev0", False), ("2.0", False),
    ],
)  # fmt: skip
def test_release_outside_the_range_is_refused(version, fits, monkeypatch):
    library = ModuleType("library")
    library.__version__ = version
    monkeypatch.setitem(sys.modules, "library", None if version == "none" else library)
    if fits:
        require_release("patch", "library", "1.2.0", "1.5", "rlk-ours")
        return
    with pytest.raises(PlatformError) as caught:
        require_release("patch", "library", "1.2.0", "1.5", "rlk-ours")
    expected = "patch: library must be 1.2.0 or newer and at most 1.5, got"
    assert str(caught.value) == f'{expected} {version}; pip install "rlk-ours[library]"'


def test_report_shows_a_line_for_each_site_and_counts_them():
    sites = [Place("a.norm", 0.5), Place("b", None, "it has no eps"), Place("c", 1.0)]
    report = PatchReport.of("patch", sites)
    assert (report.changed, report.left) == ((sites[0], sites[2]), (sites[1],))
    assert str(report).splitlines() == [
        "site    eps",
        "a.norm  0.5  patched",
        "c       1.0  patched",
        "b       -    left alone: it has no eps",
        "2 patched, 1 left alone",
    ]


@dataclass(frozen=True)
class Spot:
    module: nn.Module

    def described(self, to_ours):
        unfit = own_class(self.module) is (Doubled if to_ours else nn.Identity)
        return Place("", None, "it is so already" if unfit else "")

    def change(self, to_ours):
        kinds = (nn.Identity, Doubled)
        change_class(self.module, *(kinds if to_ours else kinds[::-1]))


def test_exchange_changes_what_nothing_stands_against_and_reports_the_rest():
    model = nn.ModuleList([nn.Identity(), Doubled()])

    def find(model):
        return [Spot(module) for module in model]

    report = exchange("patch", model, find, "an identity")
    assert (len(report.changed), len(report.left)) == (1, 1)
    assert [type(module) for module in model] == [Doubled, Doubled]
    assert len(exchange("unpatch", model, find, "an identity").changed) == 2
    assert [type(module) for module in model] == [nn.Identity, nn.Identity]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("name", "patch: model must be a torch.nn.Module, got str"),
        (nn.Flatten(), "patch: model must hold an identity, got Flatten without one"),
    ],
)
def test_exchange_without_a_module_or_a_site_is_refused(model, expected):
    with pytest.raises(ArgumentError) as caught:
        exchange("patch", model, lambda model: [], "an identity")
    assert str(caught.value) == expected
