# SPDX-License-Identifier: Apache-2.0
"""What every operator must pass, inherited from core."""

from rlk.pytest_plugin import OperatorSuite
from rlk_rope.multi_axis_rope.operator import OPERATOR as MULTI_AXIS_ROPE
from rlk_rope.multi_axis_rope_qk.operator import OPERATOR as MULTI_AXIS_ROPE_QK

# The other backends are judged by `rlk gate --all`, which CI runs beside the tests.
BACKENDS = ("golden",)


class TestMultiAxisRope(OperatorSuite):
    operator = MULTI_AXIS_ROPE
    backends = BACKENDS


class TestMultiAxisRopeQk(OperatorSuite):
    operator = MULTI_AXIS_ROPE_QK
    backends = BACKENDS
