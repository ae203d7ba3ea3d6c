# SPDX-License-Identifier: Apache-2.0
"""The cache of binaries, under processes that race, die and meddle."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import time

import pytest

from rlk.cuda import build, sources, toolchain
from rlk.errors import BackendError

ARCH = "sm_90"
# 60 seconds: far more than a compilation takes.
PATIENCE = 60


def entries(cache):
    """The finished entries of a cache."""
    return [
        p.parent for p in cache.glob(f"*/{sources.MANIFEST}") if not p.parts[-2].startswith(".")
    ]


def leftovers(cache):
    """The folders of unfinished builds."""
    return [p for p in cache.glob(".*") if p.is_dir()]


def build_in_processes(count, source, generated):
    """The paths that `count` processes get at once."""
    context = multiprocessing.get_context("fork")
    answers, together = context.Queue(), context.Barrier(count)

    def work():
        together.wait()
        answers.put(build.build(source, "demo", generated, ARCH))

    workers = [context.Process(target=work) for _ in range(count)]
    for worker in workers:
        worker.start()
    paths = [answers.get(timeout=PATIENCE) for _ in workers]
    for worker in workers:
        worker.join()
    return paths


def test_build_by_eight_processes_compiles_one_entry(source, generated, cache, nvcc_script):
    log = nvcc_script("true")
    paths = build_in_processes(8, source, generated)
    assert len(set(paths)) == 1
    assert entries(cache) == [paths[0].parent]
    assert (log.read_text().split(), leftovers(cache)) == (["compiled"], [])


def test_build_without_file_locks_ends_with_one_entry(source, generated, cache, monkeypatch):
    if toolchain.nvcc_missing() is not None:
        pytest.skip("needs nvcc")
    monkeypatch.setattr(build, "_lock", lambda folder: contextlib.nullcontext())
    paths = build_in_processes(2, source, generated)
    assert len(set(paths)) == 1
    assert (entries(cache), leftovers(cache)) == ([paths[0].parent], [])
    assert build.find(source, "demo", generated, ARCH) == paths[0]


def test_build_killed_halfway_leaves_nothing_that_counts(source, generated, cache, nvcc_script):
    log = nvcc_script("exec sleep 20")
    context = multiprocessing.get_context("fork")

    def work():
        os.setsid()
        build.build(source, "demo", generated, ARCH)

    worker = context.Process(target=work)
    worker.start()
    deadline = time.monotonic() + PATIENCE
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(worker.pid, signal.SIGKILL)
    worker.join()
    assert build.find(source, "demo", generated, ARCH) is None
    (abandoned,) = leftovers(cache)
    os.utime(abandoned, (0, 0))
    script = toolchain.nvcc("test")
    with open(script) as file:
        text = file.read()
    with open(script, "w") as file:
        file.write(text.replace("exec sleep 20", "true"))
    path = build.build(source, "demo", generated, ARCH)
    assert (entries(cache), leftovers(cache)) == ([path.parent], [])


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no binary", "bad manifest", "empty"])
def test_find_damaged_entry_is_not_used(source, generated, warm, damage):
    assert build.find(source, "demo", generated, ARCH) == warm
    content = warm.read_bytes()
    if damage == "truncated":
        warm.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        warm.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    elif damage == "no binary":
        warm.unlink()
    elif damage == "bad manifest":
        (warm.parent / sources.MANIFEST).write_text("[]")
    else:
        (warm.parent / sources.MANIFEST).write_text("")
    assert build.find(source, "demo", generated, ARCH) is None


def test_build_truncated_entry_is_compiled_again(source, generated, warm, cache):
    whole = warm.read_bytes()
    warm.write_bytes(whole[:1000])
    assert build.build(source, "demo", generated, ARCH) == warm
    assert warm.stat().st_size > len(whole) // 2
    assert build.find(source, "demo", generated, ARCH) == warm
    assert (entries(cache), leftovers(cache)) == ([warm.parent], [])


def test_build_file_in_the_place_of_an_entry_is_replaced(source, generated, warm, tmp_path):
    finished = tmp_path / "finished"
    warm.parent.rename(finished)
    warm.parent.write_text("not a folder")
    (tmp_path / "aside").mkdir()
    entry = tmp_path / "aside" / "entry"
    finished.rename(entry)
    build._publish(entry, warm.parent, "demo")
    assert build.find(source, "demo", generated, ARCH) == warm


def test_build_warm_cache_compiles_nothing(source, generated, warm, nvcc_script):
    log = nvcc_script("exit 1")
    assert build.build(source, "demo", generated, ARCH) == warm
    assert not log.exists()


def test_find_changed_text_is_another_entry(source, generated, warm):
    def known():
        return build.find(source, "demo", generated, ARCH) == warm

    assert known()
    device = source.parents[2] / "demo" / "device.cuh"
    for path in (source, device):
        text = path.read_text()
        path.write_text(text + "\n// another text\n")
        assert not known()
        path.write_text(text)
        assert known()
    assert build.find(source, "demo", {k: v + "\n" for k, v in generated.items()}, ARCH) is None
    assert build.find(source, "demo", generated, "sm_80") is None


@pytest.mark.parametrize(("name", "value"), [("ABI", 2), ("LINK_FLAGS", ()), ("_FLAGS", ("-O3",))])
def test_find_other_abi_or_flags_is_another_entry(
    source, generated, warm, monkeypatch, name, value
):
    monkeypatch.setattr(toolchain, name, value)
    assert build.find(source, "demo", generated, ARCH) is None


def test_included_headers_of_the_demo_are_the_ones_it_reaches(source, generated):
    assert sorted(sources.included(source, generated)) == [
        "demo/device.cuh", "kernel_cuda.cu", "rlk/cuda/launch.cuh", "rlk_demo.h",
    ]  # fmt: skip


def test_included_header_beside_the_source_hides_a_generated_one(source, generated):
    (source.parent / "rlk_demo.h").write_text("// stale")
    assert "// stale" in sources.included(source, generated).values()


def test_build_source_edited_during_compilation_is_compiled_again(
    source, generated, cache, nvcc_script
):
    device = source.parents[2] / "demo" / "device.cuh"
    edit = f"grep -q edited {device} || echo '// edited' >> {device}"
    log = nvcc_script(edit)
    path = build.build(source, "demo", generated, ARCH)
    assert log.read_text().split() == ["compiled", "compiled"]
    assert "// edited" in device.read_text()
    assert build.find(source, "demo", generated, ARCH) == path


def test_build_broken_source_shows_the_compiler_error(source, generated, cache, needs_nvcc):
    source.write_text(source.read_text().replace("value;", "no_such_name;"))
    with pytest.raises(BackendError, match=r"kernel_cuda\.cu must compile, got\n(.|\n)*no_such_na"):
        build.build(source, "demo", generated, ARCH)
    assert (entries(cache), leftovers(cache)) == ([], [])


def test_build_cache_below_a_file_names_the_variable(source, generated, tmp_path, monkeypatch):
    if toolchain.nvcc_missing() is not None:
        pytest.skip("needs nvcc")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(BackendError) as raised:
        build.build(source, "demo", generated, ARCH)
    assert str(raised.value) == (
        "demo: RLK_CACHE_DIR must be a writable folder with space left, "
        f"got {tmp_path / 'file' / 'cache'} (Not a directory); set it to one"
    )


def test_build_full_disk_names_the_variable(source, generated, cache, nvcc_script):
    nvcc_script("echo 'fatal error: error writing: No space left on device'; exit 1")
    with pytest.raises(BackendError, match=r"RLK_CACHE_DIR must .* \(No space left on device\)"):
        build.build(source, "demo", generated, ARCH)
    assert (entries(cache), leftovers(cache)) == ([], [])


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 256 KiB, on which no binary finds room."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, check=False).returncode != 0:
        pytest.skip("needs the right to mount a disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_build_on_a_disk_that_fills_up_says_so_and_leaves_nothing(
    source, generated, needs_nvcc, small_disk, monkeypatch
):
    monkeypatch.setenv(build.CACHE_VARIABLE, str(small_disk / "cache"))
    with pytest.raises(BackendError, match=r"demo: RLK_CACHE_DIR must be .* \(No space left on"):
        build.build(source, "demo", generated, ARCH)
    assert (entries(small_disk / "cache"), leftovers(small_disk / "cache")) == ([], [])
    assert build.find(source, "demo", generated, ARCH) is None


def test_build_in_a_read_only_home_says_so_and_uses_what_is_there(
    source, generated, built, needs_nvcc, small_disk, monkeypatch
):
    monkeypatch.delenv(build.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(small_disk))
    cache = build.cache_folder()
    # Of 256 KiB, a link takes none.
    entry = cache / built.parent.name
    entry.parent.mkdir(parents=True)
    entry.symlink_to(built.parent)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert build.build(source, "demo", generated, ARCH) == entry / "demo.so"
    with pytest.raises(BackendError) as raised:
        build.build(source, "demo", generated, "sm_80")
    assert str(raised.value) == (
        "demo: RLK_CACHE_DIR must be a writable folder with space left, "
        f"got {cache} (Read-only file system); set it to one"
    )


def test_cache_folder_without_a_home_names_the_variable(monkeypatch):
    def no_home(*arguments):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(build.CACHE_VARIABLE, raising=False)
    monkeypatch.setattr(build.Path, "home", no_home)
    with pytest.raises(BackendError, match="RLK_CACHE_DIR must name a folder"):
        build.cache_folder()


def test_machine_without_nvcc_uses_the_newest_built_entry(
    source, generated, warm, tmp_path, monkeypatch
):
    for release in ("9.9.9", "99.10.1", "99.9.2"):
        stem = warm.parent.name.rpartition("-nvcc")[0]
        older = warm.parent.with_name(f"{stem}-nvcc{release}")
        older.mkdir()
        for file in warm.parent.iterdir():
            (older / file.name).write_bytes(file.read_bytes())
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert build.missing(source, "demo", generated, ARCH) is None
    found = build.build(source, "demo", generated, ARCH)
    assert found.parent.name.endswith("-nvcc99.10.1")


def test_machine_without_nvcc_and_entries_says_what_is_missing(
    source, generated, cache, tmp_path, monkeypatch
):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert build.missing(source, "demo", generated, ARCH) == (
        "of prebuilt kernels, this installation brings none; it needs nvcc 12.8 or newer, "
        "got none; set CUDA_HOME or choose another backend"
    )
    with pytest.raises(BackendError, match='demo: backend "cuda" needs nvcc 12.8 or newer'):
        build.build(source, "demo", generated, ARCH)


@pytest.mark.parametrize("arch", toolchain.ARCHITECTURES)
def test_compile_only_every_generation_gives_code_without_spills(
    source, generated, needs_nvcc, arch
):
    compiled = build.compile_only(source, "demo", generated, arch)
    assert f".target {arch}" in compiled.ptx
    assert any("forward" in kernel for kernel in compiled.resources)
    assert {r.spill_stores + r.spill_loads for r in compiled.resources.values()} == {0}


def test_compile_only_flags_in_the_environment_are_not_taken(
    source, generated, needs_nvcc, monkeypatch
):
    # Taken, it would end the compilation.
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--no-such-flag")
    ptx = build.compile_only(source, "demo", generated, ARCH).ptx
    assert "div.rn.f32" in ptx
    assert ".ftz" not in ptx


def test_resources_of_an_entry_come_from_its_log(built):
    assert all(0 < r.registers <= 255 for r in build.resources(built).values())
    log = """ptxas info    : Compiling entry function '_Z4softv' for 'sm_90'
ptxas info    : Function properties for _Z4softv
    24 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers"""
    expected = build.Resources(registers=40, stack=24, spill_stores=8, spill_loads=12)
    assert build.resources_in(log) == {"_Z4softv": expected}
