# SPDX-License-Identifier: Apache-2.0
"""Claims and the records that judged them: where, for which tensors, at which tier."""

from collections.abc import Callable, Iterable, Mapping

from docs_pages.evidence import Evidence, Found, short_commit
from rlk.operator import CLAIM_WORDS, Backend, Claim, Operator
from rlk.records import GateSummary
from rlk.report.markdown import table

NOT_RUN = "not run"


def overview(
    operators: Mapping[str, Operator],
    evidence: Evidence,
    page: Callable[[Operator], str] = lambda operator: f"operators/{operator.name}.md",
    folder: str = "records/",
    told: Callable[[Found], str] = lambda found: found.words,
) -> str:
    """What each operator claims, where it passed, and the records that judged it.

    `page` is where its page lies, `folder` where records do, and `told` how one is put in words.
    """
    words = [w for w in CLAIM_WORDS if any(o.claimed(w) for o in operators.values())]
    rows = []
    for operator in operators.values():
        cells = [_of_word(operator, word, evidence, told) for word in words]
        rows.append((f"[{operator.name}]({page(operator)})", *cells))
    shown = table(("operator", *(f"`{word}`" for word in words)), rows)
    return f"{shown}\n{sources(operators.values(), evidence, folder)}"


def sources(operators: Iterable[Operator], evidence: Evidence, folder: str) -> str:
    """One line with the records that judged claims of these operators, by platform."""
    cited: dict[str, dict[str, list[str]]] = {}
    for operator in operators:
        for path in dict.fromkeys(found.path for found in _found(operator, evidence)):
            platform = evidence.records[path].origin.platform
            cited.setdefault(platform, {}).setdefault(path, []).append(operator.name)
    links = []
    for platform, paths in cited.items():
        for path, names in paths.items():
            record = evidence.records[path]
            tier = record.tier if isinstance(record, GateSummary) else NOT_RUN
            of = f" of {', '.join(names)}" if len(paths) > 1 else ""
            links.append(
                f"[{platform}]({folder}{path}){of}, tier {tier}, at {short_commit(record.origin)}"
            )
    return f"Records: {'; '.join(links) or NOT_RUN}.\n"


def _found(operator: Operator, evidence: Evidence) -> Iterable[Found]:
    for claim in operator.claims:
        for platform in evidence.platforms:
            yield from _judged(operator, claim, platform, evidence).values()


def _promising(operator: Operator, claim: Claim) -> list[Backend]:
    """The backends of which a claim speaks."""
    return [b for b in operator.backends if not claim.among or b.name in claim.among]


def _judged(
    operator: Operator, claim: Claim, platform: str, evidence: Evidence
) -> dict[str, Found]:
    """What records say of a claim there, by backend."""
    names = [backend.name for backend in _promising(operator, claim)]
    answers = {name: evidence.claim(operator, claim.word, name, platform) for name in names}
    return {name: found for name, found in answers.items() if found is not None}


def _of_word(
    operator: Operator, word: str, evidence: Evidence, told: Callable[[Found], str]
) -> str | None:
    """The cell of a word: None where nothing is claimed."""
    parts = []
    for claim in (claim for claim in operator.claims if claim.word == word):
        places = ", ".join(_places(operator, claim, evidence, told))
        if not places:
            parts.append(NOT_RUN)
            continue
        among = claim.among and {b.name for b in operator.backends} - {*claim.among}
        places += f" among {', '.join(claim.among)}" if among else ""
        partial = _could_hold(operator, word) - {*claim.tensors}
        tensors = f"{', '.join(f'`{name}`' for name in claim.tensors)} on " if partial else ""
        parts.append(f"{tensors}{places}")
    return "; ".join(dict.fromkeys(parts)) or None


def _places(
    operator: Operator, claim: Claim, evidence: Evidence, told: Callable[[Found], str]
) -> Iterable[str]:
    """Platforms, with backends where it is not all that serve it; what is not green stands out."""
    for platform in evidence.platforms:
        kind = "nvidia" if platform.startswith("sm_") else platform
        answers = _judged(operator, claim, platform, evidence)
        serving = {b.name for b in _promising(operator, claim) if kind in b.platforms}
        by_words: dict[str, list[str]] = {}
        for name, found in answers.items():
            by_words.setdefault(told(found), []).append(name)
        for words, names in by_words.items():
            place = platform if serving <= {*names} else f"{platform} ({', '.join(names)})"
            yield place if words == "passed" else f"**{words}: {place}**"


def _could_hold(operator: Operator, word: str) -> set[str]:
    """The outputs and gradients of which a word can speak."""
    outputs = {t.name for t in operator.outputs}
    rows = {f"d{t.name}" for t in operator.differentiable if not t.is_parameter}
    sums = {f"d{t.name}" for t in operator.parameters}
    return {
        "batch_invariant": outputs | rows,
        "order_free": sums,
        "rollout_equal": outputs,
    }.get(word, outputs | rows | sums)
