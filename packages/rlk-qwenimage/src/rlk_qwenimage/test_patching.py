# SPDX-License-Identifier: Apache-2.0
"""What patching refuses before it looks at a model of diffusers."""

import pytest

import rlk_qwenimage
from rlk.errors import ArgumentError
from rlk.test_support.patched_models import assert_release_refused

FUNCTIONS = [rlk_qwenimage.patch, rlk_qwenimage.unpatch]


@pytest.fixture(params=FUNCTIONS, ids=lambda function: function.__name__)
def function(request):
    return request.param


def test_patching_something_that_is_no_module_is_refused(function):
    with pytest.raises(ArgumentError) as caught:
        function("Qwen/Qwen-Image")
    assert str(caught.value) == f"{function.__name__}: model must be a torch.nn.Module, got str"


@pytest.mark.parametrize("version", ["none", "0.34.0", "0.43.0", "0.43.0.dev0", "1.0.0"])
def test_patching_beside_another_diffusers_is_refused(function, version, monkeypatch):
    supported = "0.35.0 or newer and at most 0.42"
    assert_release_refused(function, "diffusers", version, supported, monkeypatch)
