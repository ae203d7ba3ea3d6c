# SPDX-License-Identifier: Apache-2.0
"""Which tests of the suite an operator's class has, and on which devices."""

import inspect
from types import SimpleNamespace

import pytest

from rlk.pytest_plugin import (
    OperatorSuite,
    pytest_generate_tests,
    pytest_pycollect_makeitem,
)

LINEAR = "test_second_and_third_derivative_of_a_linear_operator_are_its_own"
OTHER = "test_second_differentiation_is_refused_for_every_pair"
ANY = "test_needed_gradients_alone_reach_the_backend"


def collected(suite, name):
    """Whether pytest goes on to make items of a test."""
    made = pytest_pycollect_makeitem(SimpleNamespace(cls=suite), name, getattr(suite, name))
    assert made in (None, [])
    return made is None


@pytest.mark.parametrize("linear", [True, False])
def test_derivatives_of_one_kind_of_operator_are_collected_for_it_alone(linear):
    suite = type("Suite", (OperatorSuite,), {"operator": SimpleNamespace(linear=linear)})
    names = [name for name in (LINEAR, OTHER, ANY) if collected(suite, name)]
    assert names == [LINEAR if linear else OTHER, ANY]


def test_tests_outside_a_suite_are_left_to_pytest():
    assert pytest_pycollect_makeitem(SimpleNamespace(), ANY, getattr(OperatorSuite, LINEAR)) is None
    assert collected(SimpleNamespace, "__init__")


@pytest.mark.parametrize(
    ("platforms", "expected"), [(("cpu", "nvidia"), ["cpu", "cuda"]), (("nvidia",), ["cuda"])]
)
def test_registration_is_checked_on_every_kind_of_device_that_serves(platforms, expected):
    operator = SimpleNamespace(backends=[SimpleNamespace(platforms=platforms)])
    test = OperatorSuite.test_registration_opcheck_passes
    devices = {}
    pytest_generate_tests(
        SimpleNamespace(
            cls=type("Suite", (OperatorSuite,), {"operator": operator}),
            fixturenames=inspect.signature(test).parameters,
            parametrize=devices.__setitem__,
        )
    )
    assert [getattr(d, "values", (d,))[0] for d in devices["device"]] == expected
    assert {m.name for m in devices["device"][-1].marks} == {"gpu", "skipif"}
