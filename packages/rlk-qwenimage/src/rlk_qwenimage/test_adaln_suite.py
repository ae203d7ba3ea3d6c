# SPDX-License-Identifier: Apache-2.0
"""What every operator must pass, inherited from core."""

from functools import partial

from rlk.gates.inputs import smallest_sizes
from rlk.pytest_plugin import OperatorSuite
from rlk_qwenimage import AdaLayerNormContinuous, ModulationLinear
from rlk_qwenimage.adaln_mod_projection.operator import OPERATOR as ADALN_MOD_PROJECTION
from rlk_qwenimage.final_adaln_out.operator import OPERATOR as FINAL_ADALN_OUT

# The other backends are judged by `rlk gate --all`, which CI runs beside the tests.
BACKENDS = ("golden",)
PROJECTION, FINAL = smallest_sizes(ADALN_MOD_PROJECTION), smallest_sizes(FINAL_ADALN_OUT)


class TestAdalnModProjection(OperatorSuite):
    operator = ADALN_MOD_PROJECTION
    backends = BACKENDS
    modules = (partial(ModulationLinear, PROJECTION["K"], PROJECTION["N"]),)


class TestFinalAdalnOut(OperatorSuite):
    operator = FINAL_ADALN_OUT
    backends = BACKENDS
    modules = (
        partial(AdaLayerNormContinuous, FINAL["H"], FINAL["K"], elementwise_affine=False, eps=1e-6),
    )
