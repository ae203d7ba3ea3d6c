# SPDX-License-Identifier: Apache-2.0
"""The backends that compute this package's operators on this machine."""

import pytest

from rlk import interpreter

# Before a kernel is imported: it decides there how it runs.
INTERPRETED = interpreter.enable_without_gpu()

NEEDS_INTERPRETER = pytest.mark.skipif(not INTERPRETED, reason="needs triton's interpreter")


@pytest.fixture(params=["golden", pytest.param("triton", marks=NEEDS_INTERPRETER)])
def backend(request):
    return request.param


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def dtype(request):
    return request.param
