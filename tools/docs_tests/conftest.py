# SPDX-License-Identifier: Apache-2.0
"""A copy of the repository in which a test may plant a fault; the site of the real one."""

import shutil
import subprocess

import docs_stage
import pytest
from docs_pages.evidence import Evidence
from docs_stage import ROOT

from rlk import environment, registry
from rlk.report import plots


@pytest.fixture(scope="session")
def operators():
    """Every operator."""
    found, failures = registry.discover()
    assert found
    assert not failures
    return dict(sorted(found.items()))


@pytest.fixture
def repository(tmp_path):
    """A copy of what git tracks or would add, as a repository."""
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            target = tmp_path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
    subprocess.run(["git", "-C", str(tmp_path), "init", "-q"], check=True)
    return tmp_path


@pytest.fixture
def stage(repository, operators, monkeypatch):
    """Collects the pages of the copy; its plots are one and the same, as drawing takes long."""
    for name in ("against_peers", "roofline", "time_per_rows", "differing_rows", "ulp_histograms"):
        monkeypatch.setattr(plots, name, lambda rows: "<svg xmlns='http://www.w3.org/2000/svg'/>")

    def collected():
        evidence = Evidence(repository / "docs" / "records", environment.digests())
        return docs_stage.collect(repository, operators, evidence)

    return collected


@pytest.fixture(scope="session")
def built():
    """The folder of the site, as `hatch run docs:build` left it."""
    folder = ROOT / "build" / "site"
    assert (folder / "index.html").is_file(), "needs the site: hatch run docs:build"
    return folder
