# SPDX-License-Identifier: Apache-2.0
"""Two ranks: DTensor keeps every bit, DDP and FSDP2 those of rows."""

from typing import Any

import pytest

from rlk.operator import Operator

# The names of rank_tasks.SHARDINGS, whose module imports DTensor: only ranks pay for that.
SHARDINGS = (
    "rows",
    "second_axis",
    "rows_and_parameters",
    "parameters",
    "nothing",
    "along_rows",
    "upstream_whole",
    "partial_sums",
)


class DistributionSuite:
    """One operator on two processes: gloo on CPUs, NCCL on two GPUs."""

    operator: Operator

    @pytest.mark.parametrize("sharding", SHARDINGS)
    def test_dtensor_call_has_the_bits_of_the_whole_one(self, ranks: Any, sharding: str) -> None:
        """Outputs and gradients, parameter gradients among them: states add as integers."""
        self._run(ranks, "shard_operator", sharding)

    def test_dtensor_mesh_of_two_axes_has_the_bits_of_the_whole_one(self, ranks: Any) -> None:
        """Each mesh axis shards another leading axis."""
        self._run(ranks, "shard_on_two_axes")

    def test_dtensor_other_dtypes_of_one_shape_keep_theirs(self, ranks: Any) -> None:
        """DTensor remembers decisions by shape."""
        self._run(ranks, "shard_other_dtypes")

    def test_dtensor_sharded_rows_communicate_once_a_parameter(self, ranks: Any) -> None:
        """Nothing is gathered; the state of each parameter gradient is summed."""
        self._run(ranks, "count_communication")

    def test_dtensor_compiled_call_has_the_bits_of_the_whole_one(self, ranks: Any) -> None:
        """torch.compile, fullgraph, on DTensors."""
        self._run(ranks, "shard_compiled")

    @pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
    def test_data_parallel_averages_the_rounded_gradients_of_ranks(
        self, ranks: Any, wrap: str
    ) -> None:
        """Rows have the bits of a single process; parameter gradients their mean over ranks."""
        self._run(ranks, "average_gradients", wrap, tuple(getattr(self, "modules", ())))

    def _run(self, ranks: Any, task: str, *arguments: Any) -> None:
        ranks.run(_Task(task), self.operator.package, self.operator.name, *arguments)


class _Task:
    """A function of rank_tasks, found on the rank."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any) -> None:
        from rlk.torch_suite import rank_tasks

        getattr(rank_tasks, self.name)(*arguments)
