# SPDX-License-Identifier: Apache-2.0
"""The page of one operator: what its folder says, its declaration, and what was measured."""

import math

from docs_pages.claims import NOT_RUN, sources
from docs_pages.errors import StageError
from docs_pages.evidence import Evidence, Found
from docs_pages.markdown import before, headings
from docs_pages.measured import measured
from rlk.operator import Backend, Claim, Operator, Scalar, Tensor
from rlk.report.markdown import table

# Every page has these; what is generated stands in front of the first.
REQUIRED = ("Beside other libraries", "Reuse", "Limits")


def page(operator: Operator, text: str, evidence: Evidence) -> tuple[str, dict[str, str]]:
    """The page, and its plots by file name.

    Raises:
        StageError: the page of the folder lacks a section.
    """
    missing = [heading for heading in REQUIRED if heading not in headings(text)]
    if missing:
        raise StageError(f"{operator.name}: page.md must have a section {missing[0]}, got none")
    shown, images = measured(operator, evidence)
    parts = [_declaration(operator), _claims(operator, evidence), _dispatch(operator), shown]
    return before(text, REQUIRED[0], "\n".join(parts)), images


def _declaration(operator: Operator) -> str:
    groups = (("input", operator.inputs), ("output", operator.outputs), ("saved", operator.saved))
    tensors = [
        (f"`{t.name}`", role, f"`{_shape(t)}`", ", ".join(t.dtype), t.gradient)
        for role, found in groups
        for t in found
    ]
    scalars = [(f"`{s.name}`", f"`{s.default}`", _values_of(s)) for s in operator.scalars]
    reductions = [(f"`{r.result}`", r.primitive, r.axis) for r in operator.reductions]
    sites = [
        (w.site, ", ".join(f"{symbol} = {size}" for symbol, size in w.sizes.items()))
        for w in operator.workloads
    ]
    return "\n".join(
        [
            "## Declaration\n",
            f"`{operator.package}.{operator.name}`, bits version {operator.bits_version}.\n",
            table(("tensor", "role", "shape", "dtype", "gradient"), tensors),
            table(("scalar", "default", "values"), scalars) if scalars else "",
            table(("result", "primitive", "along"), reductions) if reductions else "",
            table(("site", "sizes"), sites),
        ]
    )


def _values_of(scalar: Scalar) -> str | None:
    """What a scalar may be; None for anything."""
    if scalar.fixed:
        return "fixed"
    if scalar.choices:
        return ", ".join(scalar.choices)
    return f"at least {scalar.minimum:g}" if math.isfinite(scalar.minimum) else None


def _shape(tensor: Tensor) -> str:
    return f"[{', '.join(tensor.shape)}]"


def columns(operator: Operator, evidence: Evidence) -> list[tuple[Backend, str]]:
    """The backends of an operator with each platform of records that they run on."""
    platforms = list(dict.fromkeys(["cpu", *evidence.platforms]))
    return [(b, p) for b in operator.backends for p in platforms if runs_on(b, p)]


def runs_on(backend: Backend, platform: str) -> bool:
    """Whether a backend is declared for cpu, or for a GPU architecture such as sm_90."""
    kind = "nvidia" if platform.startswith("sm_") else platform
    return kind in backend.platforms + backend.on_request


def cell(found: Found | None, depth: str = "../") -> str:
    """What a record says, with the link to it."""
    return NOT_RUN if found is None else f"[{found.words}]({depth}records/{found.path})"


def _claims(operator: Operator, evidence: Evidence) -> str:
    """A column for each backend and platform of which a record speaks."""
    cells = {
        (backend.name, platform): [
            _claim(operator, claim, backend.name, platform, evidence) for claim in operator.claims
        ]
        for backend, platform in columns(operator, evidence)
    }
    shown = {place: found for place, found in cells.items() if {*found} - {NOT_RUN, None}}
    empty = [" on ".join(place) for place in cells if place not in shown]
    rows = [
        (f"`{claim.word}`", ", ".join(claim.tensors), *(found[i] for found in shown.values()))
        for i, claim in enumerate(operator.claims)
    ]
    heads = [", ".join(place) for place in shown]
    return "\n".join(
        [
            "## Claims and their records\n",
            f"A cell links the record that judged the claim there; *{NOT_RUN}* is no promise "
            f"broken, only one not yet shown. `rlk gate {operator.name}` judges them here.\n",
            table(("claim", "tensors", *heads), rows),
            f"No record speaks for {', '.join(empty)}: {NOT_RUN}.\n" if empty else "",
            sources([operator], evidence, "../records/"),
        ]
    )


def _claim(
    operator: Operator, claim: Claim, backend: str, platform: str, evidence: Evidence
) -> str | None:
    """What a cell says; None where the claim says nothing of a backend or platform."""
    other_backend = claim.among and backend not in claim.among
    # Golden on a CPU is what GPUs are compared with.
    no_gpu = claim.word == "gpu_to_gpu" and (backend == "golden" or platform == "cpu")
    if other_backend or no_gpu:
        return None
    return cell(evidence.claim(operator, claim.word, backend, platform))


def _dispatch(operator: Operator) -> str:
    rows = [
        (place, f"`{b.name}`", ", ".join(b.platforms), ", ".join(b.on_request) or None)
        for place, b in enumerate(operator.backends, 1)
    ]
    return "\n".join(
        [
            "## Dispatch\n",
            "`backend=None` takes the first row that serves the device and can run there; a row "
            "named in the call is taken or refused, never replaced.\n",
            table(("order", "backend", "serves", "only by name"), rows),
        ]
    )
