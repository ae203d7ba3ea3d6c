# SPDX-License-Identifier: Apache-2.0
"""Binaries that a wheel brings: which GPU and which sources they serve, and how they are made."""

import json
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from rlk.cuda import build, kernels, launch, prebuilt, sources, toolchain, wheel
from rlk.cuda.conftest import DEMO, write_source
from rlk.cuda.library import Library
from rlk.errors import BackendError

ARCHS = ("sm_80", "sm_90")


def compiled(path, into):
    """The library and the manifest that a wheel would take in for the demo at `path`."""
    into.mkdir()
    return wheel._compile(launch.KernelModule(DEMO, path), ARCHS, into)


@pytest.fixture(scope="session")
def entry(needs_nvcc, tmp_path_factory):
    """The folder of the demo's binary, to copy from."""
    folder = tmp_path_factory.mktemp("wheel")
    (library, _), _ = compiled(write_source(folder / "sources"), folder / "made")
    return library.parent


@pytest.fixture
def brought(source, entry, cache, tmp_path, monkeypatch):
    """The binary in an installation of the demo without a compiler, on a machine with a driver."""
    folder = source.parent / prebuilt.FOLDER / "demo"
    shutil.copytree(entry, folder)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "no toolkit"))
    monkeypatch.setattr(prebuilt, "driver_version", lambda: 99000)
    return folder / "demo.so"


def verdict(source, generated, arch="sm_90"):
    """Why the binary does not serve."""
    library, reason = prebuilt.examine(source, "demo", generated, arch)
    assert library is None
    return reason


@pytest.mark.parametrize(
    ("arch", "archs", "expected"),
    [
        ("sm_80", ("sm_80",), True),
        ("sm_86", ("sm_80",), True),  # as new, of the same generation
        ("sm_80", ("sm_86",), False),
        ("sm_75", ("sm_80",), False),
        ("sm_90", ("sm_80",), True),  # by the PTX of the newest
        ("sm_90", ("sm_80", "sm_100"), False),
        ("sm_103", ("sm_90", "sm_100", "sm_120"), True),
        ("sm_110", ("sm_100", "sm_120"), False),  # its generation is not there, the PTX too new
        ("sm_121", ("sm_100", "sm_120"), True),
        ("sm_130", ("sm_100", "sm_120"), True),
    ],
)
def test_fits_follows_generations_and_the_newest_ptx(arch, archs, expected):
    assert prebuilt.fits(arch, archs) is expected


def test_build_without_compiler_takes_the_binary_of_the_wheel(source, generated, brought, cache):
    assert build.build(source, "demo", generated, "sm_90") == brought
    assert not cache.exists()
    assert Library(brought, "demo").function("rlk_abi_version", [])() == toolchain.ABI
    assert build.resources(brought) == {}


def test_explain_names_every_place_and_the_chosen_one(source, generated, brought, cache):
    release = json.loads((brought.parent / sources.MANIFEST).read_text())["nvcc"]
    places = build.explain(source, "demo", generated, "sm_90")
    assert places == [
        ("prebuilt", f"chosen: holds code for sm_80, sm_90 and newer, by nvcc {release}"),
        ("cache", f"{cache} holds none"),
        ("compiler", f"it {toolchain.nvcc_missing()}"),
    ]
    shutil.rmtree(brought.parent)
    assert [text for _, text in build.explain(source, "demo", generated, "sm_90")] == [
        "this installation brings none", f"{cache} holds none", f"it {toolchain.nvcc_missing()}",
    ]  # fmt: skip


def test_explain_with_a_compiler_chooses_the_cache_before_it(source, generated, warm, cache):
    release = toolchain.nvcc_release(toolchain.nvcc("test"))
    assert build.explain(source, "demo", generated, "sm_90") == [
        ("prebuilt", "this installation brings none"),
        ("cache", f"chosen: {cache} holds sm_90"),
        ("compiler", f"nvcc {release} at {toolchain.nvcc('test')}"),
    ]


def test_examine_edited_sources_refuse_the_binary(source, generated, brought):
    device = source.parents[2] / "demo" / "device.cuh"
    for path in (source, device):
        text = path.read_text()
        path.write_text(text + "\n// another text\n")
        assert verdict(source, generated) == "it was compiled from other sources than are installed"
        path.write_text(text)
    assert prebuilt.examine(source, "demo", generated, "sm_90")[0] == brought
    edited = {name: text + "\n" for name, text in generated.items()}
    assert verdict(source, edited) == "it was compiled from other sources than are installed"


@pytest.mark.parametrize(("name", "value"), [("ABI", 2), ("LINK_FLAGS", ()), ("_FLAGS", ("-O3",))])
def test_examine_other_abi_or_flags_refuse_the_binary(
    source, generated, brought, monkeypatch, name, value
):
    monkeypatch.setattr(toolchain, name, value)
    assert "from other sources" in verdict(source, generated)


def test_examine_stale_binary_is_compiled_again_with_nvcc(
    source, generated, brought, cache, monkeypatch
):
    monkeypatch.delenv("CUDA_HOME")
    source.write_text(source.read_text() + "// edited\n")
    assert build.build(source, "demo", generated, "sm_90").is_relative_to(cache)


@pytest.mark.parametrize("damage", ["truncated", "no binary", "no manifest", "bad manifest"])
def test_examine_damaged_binary_is_refused(source, generated, brought, damage):
    manifest = brought.parent / sources.MANIFEST
    if damage == "truncated":
        brought.write_bytes(brought.read_bytes()[:1000])
    elif damage == "bad manifest":
        manifest.write_text("[]")
    else:
        (manifest if damage == "no manifest" else brought).unlink()
    assert verdict(source, generated).startswith("it is damaged (")


def test_examine_gpu_without_code_is_told_what_there_is(source, generated, brought):
    reason = verdict(source, generated, "sm_75")
    assert reason.startswith("it holds code for sm_80, sm_90 and newer, by nvcc ")
    assert reason.endswith(", not for sm_75")


def test_examine_driver_older_than_the_compiler_is_refused(source, generated, brought, monkeypatch):
    monkeypatch.setattr(prebuilt, "driver_version", lambda: 11080)
    assert verdict(source, generated).endswith(", got one for 11.8")


def test_compile_for_a_wheel_twice_gives_the_same_bytes(entry, source, tmp_path):
    (library, manifest), place = compiled(source, tmp_path / "made")
    assert library.read_bytes() == (entry / "demo.so").read_bytes()
    assert manifest.read_bytes() == (entry / sources.MANIFEST).read_bytes()
    assert place == "demo/prebuilt/demo"


def test_fixed_folder_left_by_a_killed_build_is_emptied(tmp_path):
    with wheel._fixed_folder("f" * 32) as work:
        (work / "left").touch()
        kept = work.parent
        shutil.copytree(kept, tmp_path / "killed")
    shutil.copytree(tmp_path / "killed", kept)
    with wheel._fixed_folder("f" * 32) as work:
        assert list(work.iterdir()) == []
    assert not kept.exists()


def test_fixed_folder_of_somebody_else_is_refused(monkeypatch):
    monkeypatch.setattr(wheel.os, "getuid", lambda: -1)
    folder = Path("/tmp") / f"rlk-wheel-{'e' * 32}"
    try:
        with pytest.raises(BackendError) as raised, wheel._fixed_folder("e" * 32):
            pass
    finally:
        folder.rmdir()
    assert str(raised.value) == f"build: {folder} must be a folder of this user, got another's"


def test_fixed_folder_is_used_by_one_build_at_a_time():
    inside, most = [], []

    def work():
        with wheel._fixed_folder("d" * 32):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.05)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]


def test_platform_of_the_binary_is_the_glibc_it_needs(entry):
    tag, machine = wheel._platform([entry / "demo.so"]).split("_x86_64")
    assert tag.startswith("manylinux_2_")
    assert machine == ""
    needed = {line.split("GLIBC_")[1] for line in _dynamic_symbols(entry) if "GLIBC_2" in line}
    newest = max(int(version.split(")")[0].split()[0].split(".")[1]) for version in needed)
    assert tag == f"manylinux_2_{newest}"


def _dynamic_symbols(entry):
    command = ["readelf", "--dyn-syms", "--wide", str(entry / "demo.so")]
    lines = subprocess.check_output(command, text=True).splitlines()
    return [line.replace("@@", "@").replace("@", " ") for line in lines]


@pytest.mark.parametrize(
    ("text", "archs"),
    [
        ("all", toolchain.ARCHITECTURES),
        ("sm_90", ("sm_90",)),
        (" sm_120,sm_90; sm_80 sm_90", ("sm_80", "sm_90", "sm_120")),
    ],
)
def test_requested_archs_are_read_in_any_order(text, archs):
    assert wheel.requested_archs(text) == archs


@pytest.mark.parametrize("text", ["9.0", "sm_90a", "ALL", "sm_90 x"])
def test_requested_archs_that_are_none_are_refused(text):
    with pytest.raises(BackendError, match="RLK_CUDA_ARCHS must be all or names like sm_90"):
        wheel.requested_archs(text)


def test_compile_package_without_nvcc_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(BackendError) as raised:
        wheel.compile_package("rlk", ("sm_90",), tmp_path)
    assert str(raised.value) == (
        "build: RLK_CUDA_ARCHS needs nvcc 12.8 or newer, got none; set CUDA_HOME, or unset "
        "RLK_CUDA_ARCHS"
    )


def test_compile_package_without_sources_is_refused(tmp_path, monkeypatch, needs_nvcc):
    monkeypatch.setattr(kernels, "of_package", lambda package: [])
    with pytest.raises(BackendError, match="build: toy must declare a CUDA source, got none"):
        wheel.compile_package("toy", ("sm_90",), tmp_path)


def test_kernels_of_core_are_those_of_its_primitives():
    assert [kernels.name_of(one) for one in kernels.of_package("rlk")] == ["exact_sum", "mma_chain"]
