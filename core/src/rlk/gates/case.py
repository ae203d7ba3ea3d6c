# SPDX-License-Identifier: Apache-2.0
"""The unit of gate work: one judgment of one operator on one backend in one dtype."""

import shlex
from dataclasses import dataclass
from typing import get_args

import torch

from rlk.errors import RlkError, one_of
from rlk.gates.engines import engine_of
from rlk.gates.record import Judgment
from rlk.operator import Operator
from rlk.reduce import mma_chain

JUDGMENTS: tuple[Judgment, ...] = get_args(Judgment)
# The seed of fixtures unless another is asked for; any seed must pass.
DEFAULT_SEED = 2026


@dataclass(frozen=True)
class Case:
    """What to judge; `identity` names it on the command line."""

    operator: Operator
    backend: str
    judgment: Judgment
    dtype: str
    tier: str = "short"
    seed: int = DEFAULT_SEED

    @property
    def identity(self) -> str:
        """OPERATOR/BACKEND/JUDGMENT/DTYPE"""
        return f"{self.operator.name}/{self.backend}/{self.judgment}/{self.dtype}"

    @property
    def repro(self) -> str:
        """The command that repeats this case alone."""
        tier = "" if self.tier == "short" else f" --tier {self.tier}"
        return f"rlk gate --case {shlex.quote(self.identity)} --seed {self.seed}{tier}"

    @property
    def device(self) -> torch.device:
        """Where the case runs: golden on the CPU, kernels on the GPU where there is one."""
        gpu = self.backend != "golden" and torch.cuda.is_available()
        return torch.device("cuda" if gpu else "cpu")


def cases(
    operators: list[Operator],
    *,
    backend: str | None = None,
    tier: str = "short",
    seed: int = DEFAULT_SEED,
    identity: str | None = None,
) -> list[Case]:
    """All cases of these operators, or those of one backend, or the single one of a name.

    An operator that lacks a backend which another declares has cases there, too: what is claimed
    and cannot be judged is not passed over.

    Raises:
        RlkError: no operator declares the backend, or no case has this identity.
    """
    names = sorted({b.name for o in operators for b in o.backends})
    if backend is not None and backend not in names:
        raise RlkError(f"backend must be {one_of(names)}, got {backend!r}")
    found = [
        Case(operator, name, judgment, dtype, tier, seed)
        for operator in operators
        for name in ([b.name for b in operator.backends] if backend is None else [backend])
        for judgment in JUDGMENTS
        if _is_claimed(operator, name, judgment)
        for dtype in _dtypes(operator, judgment)
    ]
    if identity is None:
        return found
    chosen = [c for c in found if c.identity == identity]
    if not chosen:
        raise RlkError(
            f"case must be OPERATOR/BACKEND/JUDGMENT/DTYPE like {found[0].identity}, "
            f"got {identity!r}"
        )
    return chosen


def _dtypes(operator: Operator, judgment: str) -> tuple[str, ...]:
    """The dtypes in which something is to be judged."""
    return (engine_of(operator).dtype,) if judgment == "rollout_equal" else operator.inputs[0].dtype


def _is_claimed(operator: Operator, backend: str, judgment: str) -> bool:
    """Whether the operator promises on this backend what the judgment looks at."""
    if judgment == "gpu_to_gpu":
        # Golden is what other machines are compared with.
        return backend != "golden" and bool(operator.claimed(judgment))
    if judgment == "mma_schedule":
        # Golden has no tiles: it defines the values, not the bits of tensor cores.
        chained = operator.reduces_by("mma_chain")
        return chained and backend in mma_chain.BACKENDS and backend != "golden"
    if judgment in ("repeatable", "order_free", "backend_equal", "rollout_equal"):
        return bool(operator.claimed(judgment))
    return True
