# SPDX-License-Identifier: Apache-2.0
"""`rlk build` on a machine without a GPU."""

from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from rlk import backends, cli, interpreter, registry
from rlk.cli import app
from rlk.cuda import cache as kept
from rlk.cuda import launch


@pytest.fixture
def build(monkeypatch, demo, source, cache):
    """Runs `rlk build` where the demo, a variant of it and one without CUDA are installed."""
    monkeypatch.setattr(interpreter, "enable_without_gpu", lambda: False)
    # Core's own kernels take a minute to compile.
    monkeypatch.setitem(cli.build.__globals__, "of_core", dict)
    rows = (backends.cuda(lambda: launch.module(demo, source)),)
    known = {
        "demo": replace(demo, backends=rows),
        "variant": replace(demo, name="variant", backends=rows),
        "slow": replace(demo, name="slow", backends=(backends.golden(lambda: None),)),
        "odd": replace(demo, name="odd", backends=(backends.cuda(lambda: ModuleType("odd")),)),
    }

    def run(*arguments, installed=("demo", "variant", "slow")):
        found = {name: known[name] for name in installed}
        monkeypatch.setattr(registry, "discover", lambda: (found, {}))
        return CliRunner().invoke(app, ["build", *arguments])

    return run


def test_build_all_compiles_one_library_for_a_shared_source(build, cache, needs_nvcc):
    result = build("--arch", "sm_90", "--arch", "sm_80")
    assert result.exit_code == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()[2:]]
    assert [row[:2] for row in rows] == [
        ["demo", "sm_90"], ["demo", "sm_80"], ["variant", "sm_90"], ["variant", "sm_80"],
    ]  # fmt: skip
    assert [row[2] for row in rows] == ["2"] * 4
    assert len(list(cache.glob("*/demo.so"))) == 2
    assert {line.split("/")[-2] for line in result.stdout.splitlines()[2:]} == {
        path.parent.name for path in cache.glob("*/demo.so")
    }


def test_build_where_gpus_are_builds_for_them_and_probes_each(build, warm, monkeypatch):
    loaded = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(launch.KernelModule, "load", lambda module, device: loaded.append(device))
    result = build("demo")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[2].split()[:2] == ["demo", "sm_90"]
    assert loaded == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "installed", "sentence"),
    [
        ((), ("demo",), "build: --arch must be given where there is no GPU, got none; try sm_90"),
        (("demo", "--all"), ("demo",), "build: operators must be named or --all, got both"),
        (
            ("slow", "--arch", "sm_90"),
            ("demo", "slow"),
            'slow: backends must include "cuda", got golden',
        ),
        (
            ("--arch", "sm_70"),
            ("demo",),
            "build: the architecture must be at least sm_80, got 'sm_70'",
        ),
        (("--arch", "9.0"), ("demo",), "build: the architecture must be like sm_90, got '9.0'"),
        (
            ("--arch", "sm_90"),
            ("odd",),
            "odd: backend \"cuda\" must come from rlk.cuda, got <module 'odd'>",
        ),
    ],
)
def test_build_bad_request_exits_two_with_one_sentence(
    build, monkeypatch, arguments, installed, sentence
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = build(*arguments, installed=installed)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1] == f"rlk: {sentence}"


def test_build_all_includes_the_kernels_of_core(build, warm, monkeypatch):
    made = []
    core = {"sum": SimpleNamespace(binary=made.append)}
    monkeypatch.setitem(cli.build.__globals__, "of_core", lambda: core)
    monkeypatch.setitem(cli.build.__globals__, "_row", lambda name, *_: (name,) * 6)
    result = build("--all", "--arch", "sm_90", installed=("demo",))
    assert result.exit_code == 0, result.stderr
    assert made == ["sm_90"]
    assert [line.split()[0] for line in result.stdout.splitlines()[2:]] == ["sum", "demo"]


def test_cache_lists_and_clears_what_was_built_and_nothing_else(invoke_cache, warm, cache):
    left = cache / f".{warm.parent.name}.k1ll3d"
    left.mkdir()
    (cache / f".{warm.parent.name}.lock").touch()
    (cache / "strict-math-0-1.json").touch()
    other = cache / "somebody's"
    other.mkdir()
    listed = invoke_cache()
    assert listed.stdout.splitlines()[-1].startswith("1 binaries, ")
    (row,) = [line.split() for line in listed.stdout.splitlines() if line.startswith("demo")]
    assert row[:2] == ["demo", "sm_90"]
    cleared = invoke_cache("--clear")
    assert cleared.stdout.splitlines()[-1].endswith(f"removed from {cache}")
    assert list(cache.iterdir()) == [other]
    assert invoke_cache().stdout == f"0 binaries, 0.0 MiB, in {cache}\n"


@pytest.fixture
def invoke_cache(monkeypatch):
    """Runs `rlk cache`."""
    monkeypatch.setattr(interpreter, "enable_without_gpu", lambda: False)
    return lambda *arguments: CliRunner().invoke(app, ["cache", *arguments])


def test_cache_that_cannot_be_written_is_told_by_its_reason(cache, tmp_path, monkeypatch):
    assert kept.unwritable() is None
    assert list(cache.iterdir()) == []
    (tmp_path / "file").touch()
    monkeypatch.setenv("RLK_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert kept.unwritable() == "Not a directory"
