# SPDX-License-Identifier: Apache-2.0
"""What patching refuses before it looks at a model of transformers."""

import pytest

import rlk_qwen3next
from rlk.errors import ArgumentError
from rlk.test_support.patched_models import assert_release_refused

FUNCTIONS = [rlk_qwen3next.patch, rlk_qwen3next.unpatch]


@pytest.fixture(params=FUNCTIONS, ids=lambda function: function.__name__)
def function(request):
    return request.param


def test_patching_something_that_is_no_module_is_refused(function):
    with pytest.raises(ArgumentError) as caught:
        function("Qwen/Qwen3-Next-80B-A3B-Instruct")
    assert str(caught.value) == f"{function.__name__}: model must be a torch.nn.Module, got str"


@pytest.mark.parametrize("version", ["none", "4.56.2", "4.57.0", "5.18.0", "5.18.0.dev0", "6.0.0"])
def test_patching_beside_another_transformers_is_refused(function, version, monkeypatch):
    supported = "4.57.1 or newer and at most 5.17"
    assert_release_refused(function, "transformers", version, supported, monkeypatch)
