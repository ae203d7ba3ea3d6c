# SPDX-License-Identifier: Apache-2.0
"""What becomes of an exact sum at the end of a backward."""

from enum import IntEnum


class SumForm(IntEnum):
    """As SumForm of device_round.cuh, and in place of one gradient of a backward.

    STATE: the state, int64 [13, C]. ROUNDED: the sums [C], rounded once to the dtype of their
    parameter. CARRIED: two tensors, the state in FP64, to which autograd adds, and zeros like the
    parameter.
    """

    STATE = 0
    ROUNDED = 1
    CARRIED = 2
