# SPDX-License-Identifier: Apache-2.0
"""Features of PyTorch that every operator supports, as tests that an operator inherits.

`rlk.pytest_plugin.OperatorSuite` is made of these classes; each makes its calls from the
declaration alone.
"""

from rlk.torch_suite.compilation import CompilationSuite
from rlk.torch_suite.distribution import DistributionSuite
from rlk.torch_suite.exact_sums import ExactSumSuite
from rlk.torch_suite.gradients import GradientSuite
from rlk.torch_suite.surroundings import SurroundingsSuite

__all__ = [
    "CompilationSuite",
    "DistributionSuite",
    "ExactSumSuite",
    "GradientSuite",
    "SurroundingsSuite",
]
