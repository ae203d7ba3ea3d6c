# SPDX-License-Identifier: Apache-2.0
"""What every operator must pass, inherited from core."""

from rlk.pytest_plugin import OperatorSuite
from rlk_qwen3next.qwen3_next_rms_norm.operator import OPERATOR as QWEN3_NEXT_RMS_NORM
from rlk_qwen3next.rms_norm.operator import OPERATOR as RMS_NORM
from rlk_qwen3next.rms_norm_gated.operator import OPERATOR as RMS_NORM_GATED

# The other backends are judged by `rlk gate --all`, which CI runs beside the tests.
BACKENDS = ("golden",)


class TestRmsNorm(OperatorSuite):
    operator = RMS_NORM
    backends = BACKENDS


class TestQwen3NextRmsNorm(OperatorSuite):
    operator = QWEN3_NEXT_RMS_NORM
    backends = BACKENDS


class TestRmsNormGated(OperatorSuite):
    operator = RMS_NORM_GATED
    backends = BACKENDS
