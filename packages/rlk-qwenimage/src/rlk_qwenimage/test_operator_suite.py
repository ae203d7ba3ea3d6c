# SPDX-License-Identifier: Apache-2.0
"""What every operator must pass, inherited from core."""

from rlk.pytest_plugin import OperatorSuite
from rlk_qwenimage.layer_norm_modulate.operator import OPERATOR as LAYER_NORM_MODULATE

# The other backends are judged by `rlk gate --all`, which CI runs beside the tests.
BACKENDS = ("golden",)


class TestLayerNormModulate(OperatorSuite):
    operator = LAYER_NORM_MODULATE
    backends = BACKENDS
