# SPDX-License-Identifier: Apache-2.0
"""What every operator must pass, inherited from core."""

from functools import partial

from rlk.gates.inputs import smallest_sizes
from rlk.operator import Operator
from rlk.pytest_plugin import OperatorSuite
from rlk_qwen3next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated, RMSNorm
from rlk_qwen3next.qwen3_next_rms_norm.operator import OPERATOR as QWEN3_NEXT_RMS_NORM
from rlk_qwen3next.rms_norm.operator import OPERATOR as RMS_NORM
from rlk_qwen3next.rms_norm_gated.operator import OPERATOR as RMS_NORM_GATED
from rlk_qwen3next.rms_norm_residual.operator import OPERATOR as RMS_NORM_RESIDUAL
from rlk_qwen3next.rms_norm_residual_vllm.operator import OPERATOR as RMS_NORM_RESIDUAL_VLLM
from rlk_qwen3next.rms_norm_vllm.operator import OPERATOR as RMS_NORM_VLLM

# The other backends are judged by `rlk gate --all`, which CI runs beside the tests.
BACKENDS = ("golden",)


def width(operator: Operator) -> int:
    """N at which the suite calls an operator."""
    return smallest_sizes(operator)["N"]


class TestRmsNorm(OperatorSuite):
    operator = RMS_NORM
    backends = BACKENDS
    modules = (partial(RMSNorm, width(RMS_NORM)),)


class TestQwen3NextRmsNorm(OperatorSuite):
    operator = QWEN3_NEXT_RMS_NORM
    backends = BACKENDS
    modules = (partial(Qwen3NextRMSNorm, width(QWEN3_NEXT_RMS_NORM)),)


class TestRmsNormGated(OperatorSuite):
    operator = RMS_NORM_GATED
    backends = BACKENDS
    modules = (partial(Qwen3NextRMSNormGated, width(RMS_NORM_GATED)),)


class TestRmsNormResidual(OperatorSuite):
    operator = RMS_NORM_RESIDUAL
    backends = BACKENDS
    modules = (partial(RMSNorm, width(RMS_NORM_RESIDUAL)),)


# No CPU has these bits: on a GPU alone.
class TestRmsNormVllm(OperatorSuite):
    operator = RMS_NORM_VLLM
    backends = BACKENDS
    modules = (partial(RMSNorm, width(RMS_NORM_VLLM), rounding="vllm"),)


class TestRmsNormResidualVllm(OperatorSuite):
    operator = RMS_NORM_RESIDUAL_VLLM
    backends = BACKENDS
    modules = (partial(RMSNorm, width(RMS_NORM_RESIDUAL_VLLM), rounding="vllm"),)
