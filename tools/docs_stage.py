# SPDX-License-Identifier: Apache-2.0
"""Collect the pages of the site in build/docs, and write build/mkdocs.yml.

`python tools/docs_stage.py` copies docs/, takes a page from each operator's folder and the READMEs
of the primitives, fills the marks `<!-- rlk:NAME -->`, and lets links follow. It exits with 1 and
one sentence if a page breaks a rule.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "ci"))  # the limits of times
from docs_pages import claims, operator_page, reference, rollout, versions
from docs_pages.errors import StageError
from docs_pages.evidence import Evidence
from docs_pages.markdown import move_links

from rlk import environment, registry
from rlk.manifest import load_manifest
from rlk.operator import Operator

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"<!-- rlk:(\S+?)((?: \S+)*) -->")
# Words that stand for something still to be written.
PLACEHOLDER = re.compile(r"\b(?:TODO|TBD|FIXME|XXX|PLACEHOLDER)\b|\{\{|lorem ipsum", re.IGNORECASE)
GENERATED: dict[str, Callable[[Mapping[str, Operator], Evidence], str]] = {
    "claims": claims.overview,
    "command-line": reference.command_line,
    "conventions": rollout.conventions,
    "kernel-versions": versions.by_kernel,
    "missed-limits": versions.missed,
    "operators": reference.operator_list,
    "records": reference.records,
    "rollout": rollout.engines,
    "support": reference.support,
}


@dataclass
class Site:
    """The pages by their path on the site, and where each came from."""

    root: Path
    operators: Mapping[str, Operator]
    evidence: Evidence
    pages: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)

    def take(self, source: str, target: str) -> None:
        """A page of the repository."""
        self.pages[target] = (self.root / source).read_text()
        self.sources[target] = source


def collect(root: Path, operators: Mapping[str, Operator], evidence: Evidence) -> Site:
    """Every page and file of the site, finished.

    Raises:
        StageError: a page breaks a rule.
    """
    site = Site(root, operators, evidence)
    for path in sorted((root / "docs").rglob("*")):
        target = path.relative_to(root / "docs").as_posix()
        if path.suffix == ".md":
            site.take(f"docs/{target}", target.replace("records/README.md", "reference/records.md"))
        elif path.is_file():
            site.files[target] = path.read_bytes()
    core = root / "core/src/rlk"
    for path in sorted([*core.glob("reduce/*/README.md"), core / "math/README.md"]):
        target = f"concepts/reductions/{path.parent.name.replace('_', '-')}.md"
        site.take(path.relative_to(root).as_posix(), target)
    for operator in operators.values():
        (folder,) = root.glob(f"packages/*/src/{operator.package}/{operator.name}")
        source = (folder / "page.md").relative_to(root).as_posix()
        site.take(source, f"operators/{operator.name}.md")
    _finish(site)
    for path in sorted(root.glob("packages/*/src/*/manifest.json")):
        package = path.parents[2].name
        site.pages[f"manifests/{package}.md"] = reference.manifest_page(
            package, load_manifest(path)
        )
    return site


def _finish(site: Site) -> None:
    """Let links follow, add what is generated, fill marks, and refuse what is left open."""
    command = ["git", "-C", str(site.root), "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    moved = {source: target for target, source in site.sources.items()}
    moved |= {f"docs/{name}": name for name in site.files}
    for target, source in site.sources.items():
        text = move_links(site.pages[target], source, target, moved, set(listed.splitlines()))
        operator = site.operators.get(Path(target).stem)
        if operator is not None and target.startswith("operators/"):
            text, images = operator_page.page(operator, text, site.evidence)
            site.files |= {f"operators/{name}": svg.encode() for name, svg in images.items()}
        text = MARK.sub(lambda match: _filled(site, target, match), text)  # noqa: B023
        left = PLACEHOLDER.search(text) or re.search(r"<!-- rlk:.*", text)
        if left is not None:
            raise StageError(f"{source}: must be finished, got {left[0]!r}")
        site.pages[target] = text


def _filled(site: Site, target: str, match: re.Match[str]) -> str:
    """What stands in place of a mark."""
    name, arguments = match[1], match[2].split()
    if name in GENERATED and not arguments:
        return GENERATED[name](site.operators, site.evidence)
    if name == "proven" and len(arguments) == 4:
        return _proven(site, target, arguments)
    known = ", ".join([*GENERATED, "proven OPERATOR CLAIM BACKEND PLATFORM"])
    raise StageError(f"{target}: mark must be one of {known}, got {match[0]!r}")


def _proven(site: Site, target: str, arguments: list[str]) -> str:
    """The link to the record that proves a claim."""
    operator, word, backend, platform = arguments
    found = None
    if operator in site.operators:
        found = site.evidence.claim(site.operators[operator], word, backend, platform)
    if found is None or found.verdict != "passed":
        got = "none" if found is None else found.verdict
        raise StageError(
            f"{target}: {' '.join(arguments)} must have a record that passed, got {got}"
        )
    here = os.path.relpath(f"records/{found.path}", Path(target).parent)
    return f"[{found.words}, {found.origin.device}]({here})"


def navigation(root: Path, site: Site) -> list[Any]:
    """The navigation of mkdocs.yml, with the generated pages behind the index of their section."""
    configured = yaml.safe_load((root / "mkdocs.yml").read_text())
    folders = {
        "operators/index.md": "operators/",
        "manifests/index.md": "manifests/",
        "concepts/reductions.md": "concepts/reductions/",
    }

    def filled(entry: Any) -> Any:
        if isinstance(entry, dict):
            return {title: filled(value) for title, value in entry.items()}
        if not isinstance(entry, list):
            return entry
        pages = [filled(item) for item in entry]
        for index, folder in folders.items():
            if index in entry:
                pages += sorted(p for p in site.pages if p.startswith(folder) and p != index)
        return pages

    return filled(configured["nav"])


def write(root: Path, site: Site) -> None:
    """Put the site's sources and configuration into build/."""
    folder = root / "build" / "docs"
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in {**{n: t.encode() for n, t in site.pages.items()}, **site.files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    configuration = {"INHERIT": "../mkdocs.yml", "nav": navigation(root, site)}
    (root / "build" / "mkdocs.yml").write_text(yaml.safe_dump(configuration, sort_keys=False))


def main() -> int:
    """The exit status."""
    found, failures = registry.discover()
    if failures or not found:
        print(f"docs: every operator package must be importable, got {failures or 'none'}")
        return 1
    evidence = Evidence(ROOT / "docs" / "records", environment.digests())
    try:
        site = collect(ROOT, dict(sorted(found.items())), evidence)
    except StageError as error:
        print(f"docs: {error}", file=sys.stderr)
        return 1
    write(ROOT, site)
    print(f"docs: {len(site.pages)} pages in build/docs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
