# SPDX-License-Identifier: Apache-2.0
"""The environment says what is there and what arithmetic really does."""

import json
import platform
import subprocess

import msgspec
import pytest
import torch

import rlk
from rlk import environment

FACTS = {
    "platform", "python", "torch", "triton", "triton_interpreter", "cuda", "packages", "device",
    "device_count", "compute_capability", "driver", "threads", "tf32", "flush_denormal",
    "fast_math",
}  # fmt: skip


def git(folder, *arguments):
    identity = ("-c", "user.name=A", "-c", "user.email=a@b")
    subprocess.run(["git", *identity, "-C", str(folder), *arguments], check=True)


@pytest.fixture
def checkout(tmp_path):
    """A git checkout that tracks one package, with the package's folder."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "-q", "-m", "package")
    return package


def test_facts_always_are_json_with_every_key():
    found = environment.facts()
    assert set(found) == FACTS
    assert json.loads(msgspec.json.encode(found)) == found
    assert found["python"] == platform.python_version()
    assert found["torch"] == torch.__version__
    assert found["packages"]["rlk-core"]["version"] == rlk.__version__


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_facts_without_gpu_leave_its_facts_null():
    found = environment.facts()
    assert (found["compute_capability"], found["driver"], found["device_count"]) == (None, None, 0)


def test_arithmetic_of_a_default_process_is_strict():
    found = environment.facts()
    assert (found["tf32"], found["flush_denormal"], found["fast_math"]) == (False, False, False)


def test_flush_denormal_switched_on_is_observed():
    if not torch.set_flush_denormal(True):
        pytest.skip("needs a processor that can flush subnormals")
    try:
        assert environment._flushes_subnormals(torch.device("cpu"))
    finally:
        torch.set_flush_denormal(False)


def test_tf32_multiplication_is_observed(monkeypatch):
    # TF32 keeps 10 bits of the significand: 13 of the 23 are cut off.
    def tf32(a, b):
        cut = [(t.view(torch.int32) & ~0x1FFF).view(torch.float32) for t in (a, b)]
        return cut[0].mm(cut[1])

    monkeypatch.setattr(torch.Tensor, "__matmul__", tf32)
    assert not environment._matmul_keeps_float32(torch.device("cpu"))


def test_fast_division_is_observed(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "__truediv__", lambda a, b: a * b.reciprocal())
    assert not environment._divides_correctly(torch.device("cpu"))


def test_source_of_a_checkout_names_commit_and_changes(checkout):
    commit = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    environment._source.cache_clear()
    clean = environment.digest(checkout)
    assert environment._source(checkout) == {"commit": commit, "dirty": False, "digest": clean}
    (checkout / "kernel.py").write_text("")
    environment._source.cache_clear()
    changed = environment.digest(checkout)
    assert environment._source(checkout) == {"commit": commit, "dirty": True, "digest": changed}
    assert changed != clean


def test_source_of_a_package_another_checkout_does_not_track_is_null(checkout):
    installed = checkout.parent / "venv" / "package"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    environment._source.cache_clear()
    found = environment._source(installed)
    assert found == {"commit": None, "dirty": None, "digest": environment.digest(installed)}


def test_digest_follows_what_decides_results_and_nothing_else(checkout):
    clean = environment.digest(checkout)
    others = ("page.md", "report/plots.py", "cli/gate.py", "norm/prebuilt/norm/manifest.json")
    for name in ("test_kernel.py", "conftest.py", *others):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("changed")
    assert environment.digest(checkout) == clean
    for name in ("kernel.cu", "bounds.json", "deep/device.cuh"):
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).write_text("changed")
        changed = environment.digest(checkout)
        assert changed != clean
        clean = changed


def test_digest_tells_a_file_that_was_moved_or_cut_elsewhere(tmp_path):
    for name, files in {"a": ("12", "3"), "b": ("1", "23")}.items():
        (tmp_path / name).mkdir()
        for file, text in zip(("x.py", "y.py"), files, strict=True):
            (tmp_path / name / file).write_text(text)
    assert environment.digest(tmp_path / "a") != environment.digest(tmp_path / "b")
    moved = environment.digest(tmp_path / "a")
    (tmp_path / "a" / "y.py").rename(tmp_path / "a" / "z.py")
    assert environment.digest(tmp_path / "a") != moved


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_arithmetic_under_another_default_dtype_is_that_of_float32(dtype):
    cpu, default = torch.device("cpu"), torch.get_default_dtype()
    flushes = torch.set_flush_denormal(True)
    try:
        torch.set_default_dtype(dtype)
        assert environment._flushes_subnormals(cpu) == flushes
        torch.set_flush_denormal(False)
        assert not environment._flushes_subnormals(cpu)
        assert environment._matmul_keeps_float32(cpu)
    finally:
        torch.set_flush_denormal(False)
        torch.set_default_dtype(default)
