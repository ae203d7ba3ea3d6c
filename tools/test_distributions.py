# SPDX-License-Identifier: Apache-2.0
"""What is built of every distribution: complete, licensed, of one version, the same twice."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from rlk.cuda import toolchain

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = (ROOT / "core", *sorted((ROOT / "packages").iterdir()))
# Copies: a distribution holds no file from above its folder.
SHARED = {"LICENSE": ROOT / "LICENSE", "NOTICE": ROOT / "NOTICE"}
VERSION = re.search(r'__version__ = "(.*)"', (ROOT / "core/src/rlk/__init__.py").read_text())[1]
KINDS = {"sdist": ".tar.gz", "wheel": ".whl"}


def build(project, into, *kinds, **environment):
    """What hatchling builds of a project folder, by kind."""
    targets = [part for kind in kinds for part in ("-t", kind)]
    command = [sys.executable, "-m", "hatchling", "build", *targets, "-d", str(into)]
    env = {k: v for k, v in os.environ.items() if k != "RLK_CUDA_ARCHS"} | environment
    done = subprocess.run(
        command, cwd=project, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {kind: next(file for file in into.glob(f"*{KINDS[kind]}")) for kind in kinds}


def files_in(archive):
    """The text or bytes of every file of a wheel or sdist, by path."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            return {name: opened.read(name) for name in opened.namelist()}
    with tarfile.open(archive) as opened:
        members = [m for m in opened.getmembers() if m.isfile()]
        return {m.name.partition("/")[2]: opened.extractfile(m).read() for m in members}


@pytest.fixture(scope="module", params=PROJECTS, ids=lambda project: project.name)
def built(request, tmp_path_factory):
    """A project folder, with its sdist and its pure wheel."""
    into = tmp_path_factory.mktemp("dist")
    return request.param, build(request.param, into, "sdist", "wheel")


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_copies_in_every_project_equal_the_first(project):
    for name, first in {**SHARED, "hatch_build.py": ROOT / "core" / "hatch_build.py"}.items():
        assert (project / name).read_bytes() == first.read_bytes(), f"copy {first} to {project}"


def test_archives_hold_the_licence_and_the_notice(built):
    _, archives = built
    for kind, archive in archives.items():
        found = files_in(archive)
        for name, first in SHARED.items():
            place = f"{archive.name.split('-py3')[0]}.dist-info/licenses/{name}"
            assert found[name if kind == "sdist" else place] == first.read_bytes()


def test_archives_are_of_the_version_that_core_states(built):
    _, archives = built
    assert {
        archive.name.split("-")[1].removesuffix(".tar.gz") for archive in archives.values()
    } == {VERSION}


def test_wheel_without_request_is_pure_and_holds_sources_but_no_tests(built):
    project, archives = built
    assert archives["wheel"].name.endswith("-py3-none-any.whl")
    found = files_in(archives["wheel"])
    tests = [n for n in found if "/test_" in n or "conftest" in n or "planted_faults" in n]
    assert (tests, [name for name in found if name.endswith(".so")]) == ([], [])
    sources = {f.name for f in project.rglob("*.cu*") if "test_" not in f.name}
    assert sources <= {Path(name).name for name in found}


def test_wheel_bill_of_materials_names_the_distribution_alone(built):
    project, archives = built
    found = files_in(archives["wheel"])
    (bill,) = [json.loads(text) for name, text in found.items() if "/sboms/" in name]
    itself = bill["metadata"]["component"]
    assert (bill["bomFormat"], bill["components"]) == ("CycloneDX", [])
    assert (itself["name"], itself["version"]) == (
        "rlk-core" if project.name == "core" else project.name, VERSION,
    )  # fmt: skip
    assert itself["licenses"] == [{"expression": "Apache-2.0"}]


def test_wheel_metadata_requires_core_and_no_other_package(built):
    project, archives = built
    found = files_in(archives["wheel"])
    (metadata,) = [t.decode() for n, t in found.items() if n.endswith(".dist-info/METADATA")]
    required = set(re.findall(r"^Requires-Dist: (rlk-\w+)", metadata, re.MULTILINE))
    assert required == (set() if project.name == "core" else {"rlk-core"})


def test_archives_built_twice_are_the_same_bytes(built, tmp_path):
    project, archives = built
    root = tmp_path / "elsewhere"
    copy = root / project.relative_to(ROOT)
    shutil.copytree(project, copy, ignore=shutil.ignore_patterns("__pycache__", "dist", "build"))
    shutil.copy(ROOT / ".gitignore", root)
    stated = root / "core" / "src" / "rlk" / "__init__.py"  # of the version
    stated.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "core" / "src" / "rlk" / "__init__.py", stated)
    again = build(copy, tmp_path / "dist", "sdist", "wheel")
    for kind, archive in archives.items():
        assert again[kind].read_bytes() == archive.read_bytes(), kind


def test_wheel_built_from_the_sdist_is_that_of_the_checkout(built, tmp_path):
    _, archives = built
    with tarfile.open(archives["sdist"]) as opened:
        opened.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    again = build(folder, tmp_path / "dist", "wheel")
    assert again["wheel"].read_bytes() == archives["wheel"].read_bytes()


def test_wheel_with_kernels_but_without_nvcc_is_not_built(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    env = {**os.environ, "RLK_CUDA_ARCHS": "all", "CUDA_HOME": str(tmp_path)}
    done = subprocess.run(
        command, cwd=ROOT / "core", env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert list(tmp_path.glob("*.whl")) == []
    assert (done.stdout + done.stderr).strip().splitlines()[-1] == (
        "build: RLK_CUDA_ARCHS needs nvcc 12.8 or newer, got none; set CUDA_HOME, or unset "
        "RLK_CUDA_ARCHS"
    )


# 600 seconds: it compiles real kernels.
@pytest.mark.timeout(600)
def test_wheel_with_kernels_is_for_a_platform_and_serves_without_nvcc(tmp_path):
    if toolchain.nvcc_missing() is not None:
        pytest.skip("needs nvcc")
    project = ROOT / "packages" / "rlk-rope"
    wheel = build(project, tmp_path, "wheel", RLK_CUDA_ARCHS="sm_90")["wheel"]
    assert re.fullmatch(rf"rlk_rope-{VERSION}-py3-none-manylinux_2_\d+_x86_64\.whl", wheel.name)
    found = files_in(wheel)
    info = f"rlk_rope-{VERSION}.dist-info"
    assert b"CUDA Toolkit" in found[f"{info}/extra_metadata/NVIDIA_CUDA_EULA.txt"]
    (bill,) = [json.loads(text) for name, text in found.items() if "/sboms/" in name]
    (runtime,) = bill["components"]
    assert runtime["version"] == toolchain.nvcc_release(toolchain.nvcc("test"))
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(site)
    code = """
import json
from rlk.cuda import kernels, prebuilt
found = kernels.of_package("rlk_rope")
verdicts = [prebuilt.examine(k.source, kernels.name_of(k), k.generated, "sm_90") for k in found]
print(json.dumps([verdict for _, verdict in verdicts]))
"""
    path = os.pathsep.join(
        [str(site), str(ROOT / "core" / "src"), os.environ.get("PYTHONPATH", "")]
    )
    env = {**os.environ, "PYTHONPATH": path, "CUDA_HOME": str(tmp_path)}
    verdicts = json.loads(subprocess.check_output([sys.executable, "-c", code], env=env))
    assert len(verdicts) == 2
    assert all(v.startswith("holds code for sm_90 and newer, by nvcc ") for v in verdicts)
