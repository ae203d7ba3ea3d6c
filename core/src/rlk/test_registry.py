# SPDX-License-Identifier: Apache-2.0
"""Operators are found by entry points; a broken package hides no other."""

import importlib
import sys
from importlib.metadata import distributions

import pytest
import torch

from rlk import registry
from rlk.errors import RlkError, UnknownOperatorError
from rlk.test_support import install

DECLARATION = """
from rlk.operator import Backend
from rlk.test_support import tiny_backend, tiny_operator
golden = tiny_backend()
OPERATOR = tiny_operator(
    "{name}", package="{package}", backends=(Backend("golden", lambda: golden, ("cpu",)),)
)
"""
PUBLIC = """
from rlk.publish import publish
from .operator import OPERATOR
_published = publish(OPERATOR)
def {name}(x, weight, factor=1.0, *, backend=None):
    return _published((x, weight), {{"factor": factor}}, backend)[0]
"""


def operator_files(package, *names):
    """The files of a package whose folders declare operators of these names."""
    files = {"__init__.py": ""}
    for name in names:
        files[f"{name}/__init__.py"] = ""
        files[f"{name}/operator.py"] = DECLARATION.format(name=name, package=package)
    return files


@pytest.fixture
def add(tmp_path, monkeypatch):
    """Installs a package where alone the registry looks."""

    def look(group):
        found = (entry for d in distributions(path=[str(tmp_path)]) for entry in d.entry_points)
        return [entry for entry in found if entry.group == group]

    added = set()

    def write(package, files):
        added.add(package)
        install(tmp_path, package, files)
        importlib.invalidate_caches()
        registry.discover.cache_clear()

    monkeypatch.setattr(registry, "entry_points", look)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.discover.cache_clear()
    yield write
    for name in [name for name in sys.modules if name.split(".")[0] in added]:
        del sys.modules[name]
    registry.discover.cache_clear()


def test_operators_of_installed_packages_are_found_by_name(add):
    add("rlk_one", operator_files("rlk_one", "fold", "scan"))
    add("rlk_two", operator_files("rlk_two", "sort"))
    found = registry.operators()
    assert {name: operator.package for name, operator in found.items()} == {
        "fold": "rlk_one", "scan": "rlk_one", "sort": "rlk_two",
    }  # fmt: skip
    assert registry.find("sort") is sys.modules["rlk_two.sort.operator"].OPERATOR


def test_operators_folders_and_modules_without_a_declaration_are_passed_over(add):
    files = {"plain.py": "raise AssertionError", "parts/__init__.py": "", "parts/fold.py": ""}
    add("rlk_one", {**operator_files("rlk_one", "fold"), **files})
    assert list(registry.operators()) == ["fold"]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"__init__.py": "import engine_that_is_missing"}, "No module named 'engine_that"),
        ({"__init__.py": "raise OSError('libengine.so')"}, "libengine.so"),
        ({"__init__.py": "1 / 0"}, "division by zero"),
        ({"__init__.py": "def"}, "invalid syntax"),
        (
            {"__init__.py": "", "sort/__init__.py": "", "sort/operator.py": "NAME = 'sort'"},
            "has no attribute 'OPERATOR'",
        ),
    ],
    ids=["missing-module", "missing-library", "defect", "syntax", "no-declaration"],
)
def test_operators_of_a_broken_package_are_warned_about_and_others_served(add, broken, reason):
    add("rlk_broken", broken)
    add("rlk_good", operator_files("rlk_good", "fold"))
    with pytest.warns(UserWarning, match=f"operators of rlk_broken are missing: .*{reason}"):
        assert list(registry.operators()) == ["fold"]
    with pytest.warns(UserWarning, match="rlk_broken"):
        assert registry.find("fold").package == "rlk_good"


def test_operators_of_a_sound_installation_warn_about_nothing(add, recwarn):
    add("rlk_one", operator_files("rlk_one", "fold"))
    registry.operators()
    assert not recwarn.list


def test_operators_one_name_in_two_packages_is_refused(add):
    add("rlk_one", operator_files("rlk_one", "fold", "scan"))
    add("rlk_two", operator_files("rlk_two", "fold"))
    for _ in range(2):
        with pytest.raises(RlkError) as caught:
            registry.operators()
        assert str(caught.value) == (
            "fold: the name must be unique, got declarations from rlk_one and rlk_two; "
            "uninstall one"
        )


def test_operators_one_package_announced_twice_is_one(add, tmp_path):
    add("rlk_one", operator_files("rlk_one", "fold"))
    (tmp_path / "rlk_one-1.0.dist-info").rename(tmp_path / "rlk_one-1.1.dist-info")
    add("rlk_one", {})
    assert len(registry.entry_points(group="rlk.operators")) == 2
    assert list(registry.operators()) == ["fold"]


def test_public_function_is_what_the_package_exports(add):
    exports = {"__init__.py": "import rlk_one.fold\nfold = print"}
    add("rlk_one", {**operator_files("rlk_one", "fold", "scan"), **exports})
    assert registry.public_function(registry.find("fold")) is print
    # What the package has by that name is the operator's folder.
    with pytest.raises(RlkError) as caught:
        registry.public_function(registry.find("scan"))
    assert str(caught.value) == "scan: package rlk_one must export it, got nothing"


def test_find_unknown_operator_lists_all_and_suggests_the_nearest(add):
    add("rlk_one", operator_files("rlk_one", "scan", "fold"))
    with pytest.raises(UnknownOperatorError) as caught:
        registry.find("flod")
    assert str(caught.value) == (
        "operator must be one of fold, scan, got 'flod'; did you mean fold?"
    )
    with pytest.raises(LookupError) as caught:
        registry.find("conv3d")
    assert str(caught.value) == "operator must be one of fold, scan, got 'conv3d'"


def test_find_without_packages_says_none_installed(add):
    with pytest.raises(UnknownOperatorError) as caught:
        registry.find("fold")
    assert str(caught.value) == (
        "operator must be an installed one, got 'fold' with no operator package installed"
    )


def test_discover_second_time_looks_nothing_up(add, monkeypatch):
    add("rlk_one", operator_files("rlk_one", "fold"))
    first = registry.operators()
    monkeypatch.setattr(registry, "entry_points", lambda group: pytest.fail("looked up again"))
    assert registry.operators() is first
    assert registry.find("fold") is first["fold"]


def test_package_from_outside_is_found_published_and_differentiable(add):
    files = operator_files("someone", "outside_fold")
    files["outside_fold/__init__.py"] = PUBLIC.format(name="outside_fold")
    files["__init__.py"] = "from .outside_fold import outside_fold"
    add("someone", files)
    assert registry.find("outside_fold").package == "someone"
    x = torch.tensor([[1.0, -2.0], [0.0, 3.0]], requires_grad=True)
    weight = torch.tensor([2.0, 1.0], requires_grad=True)
    y = sys.modules["someone"].outside_fold(x, weight)
    y.backward(torch.ones(2, 2))
    # y = x * max|x| * weight, by hand, the maximum counting as a constant.
    assert y.tolist() == [[4.0, -4.0], [0.0, 9.0]]
    assert x.grad.tolist() == [[4.0, 2.0], [6.0, 3.0]]
    assert weight.grad.tolist() == [2.0, 5.0]
    assert torch.equal(torch.ops.rlk.outside_fold(x, weight, 1.0, "golden")[0], y)
