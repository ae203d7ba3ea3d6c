# SPDX-License-Identifier: Apache-2.0
"""rollout_equal: outputs have the bytes of a named rollout engine's kernels.

Where the engine is installed it computes too, and the record names its version; elsewhere the
bytes are held against digests that were recorded of it.
"""

import hashlib
from collections.abc import Mapping

import torch

from rlk.arguments import dtype_name
from rlk.compare import raw_bits
from rlk.gates.candidate import Run, placed
from rlk.gates.engines import Engine, EngineCall, Recorded, engine_of
from rlk.gates.inputs import default_scalars, label
from rlk.gates.record import Record
from rlk.gates.verdict import Verdict
from rlk.operator import Operator


def rollout_equal(verdict: Verdict) -> list[Record]:
    """Every claimed output on every recorded input."""
    operator = verdict.case.operator
    engine = engine_of(operator)
    live = _installed(engine)
    records = []
    for recorded in engine.recorded:
        tensors = engine.inputs(recorded.sizes)
        inputs = {t.name: x for t, x in zip(operator.inputs, tensors, strict=True)}
        # Forward alone: upstream gradients are not read.
        upstream = {t.name: tensors[0] for t in operator.outputs}
        scalars = default_scalars(operator)
        run = verdict.candidate.run(inputs, upstream, scalars, gradients=False)
        if live is None:
            records += _against_digests(verdict, run, engine, recorded)
        else:
            records += _against_engine(verdict, run, engine, live, inputs, recorded)
    return records


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes in row-major order, little-endian."""
    return hashlib.sha256(raw_bits(tensor).numpy().tobytes()).hexdigest()


def _installed(engine: Engine) -> tuple[str, EngineCall] | None:
    try:
        return engine.load()
    except ImportError:
        return None


def _claimed(operator: Operator) -> list[str]:
    claimed = operator.claimed("rollout_equal")
    return [t.name for t in operator.outputs if t.name in claimed]


def _against_digests(
    verdict: Verdict, run: Run, engine: Engine, recorded: Recorded
) -> list[Record]:
    pair = f"{engine.name} {engine.version}, recorded"
    records = []
    for name in _claimed(verdict.case.operator):
        tensor = run.tensors[name]
        same = recorded.digests[name] == digest(tensor)
        faults = () if same else (f"the bytes of {name} are not those of {pair}",)
        records.append(
            verdict.record(
                name,
                (*verdict.faults((run,), name), *faults),
                config=label(recorded.sizes),
                config_pair=pair,
                shape=list(tensor.shape),
                dtype=dtype_name(tensor.dtype),
            )
        )
    return records


def _against_engine(
    verdict: Verdict,
    run: Run,
    engine: Engine,
    live: tuple[str, EngineCall],
    inputs: Mapping[str, torch.Tensor],
    recorded: Recorded,
) -> list[Record]:
    version, call = live
    # Of its own memory: an engine may write into its inputs.
    outputs = call(*(placed(tensor, verdict.case.device) for tensor in inputs.values()))
    operator = verdict.case.operator
    expected = dict(zip([t.name for t in operator.outputs], outputs, strict=True))
    return [
        verdict.bits(
            name,
            run.tensors[name].cpu(),
            expected[name].cpu(),
            config=label(recorded.sizes),
            pair=f"{engine.name} {version}, live",
            runs=(run,),
        )
        for name in _claimed(operator)
    ]
