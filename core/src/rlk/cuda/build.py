# SPDX-License-Identifier: Apache-2.0
"""The binary of a source: brought by the wheel, or kept in the cache, or compiled into it.

The cache has one folder for each source, architecture and compiler:

    <RLK_CACHE_DIR>/<name>-<arch>-<digest>-nvcc<release>/{<name>.so, manifest.json}

The digest covers the source, every header it includes, the flags and the ABI, so an entry never
goes stale. A folder appears by one rename when it is complete; its manifest holds the digest of
the binary, so a damaged entry is found and built again.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlk.cuda import prebuilt, sources, toolchain
from rlk.errors import BackendError

CACHE_VARIABLE = "RLK_CACHE_DIR"

# 1 hour in seconds: no build takes as long, so an older unfinished one was killed.
_ABANDONED_AFTER = 3600
# 16 MiB: the least that a build of kernels writes, its temporary files included.
_BUILD_BYTES = 2**24
# Lines of the compiler's output that an error shows.
_SHOWN_LINES = 30


@dataclass(frozen=True)
class Resources:
    """What ptxas says of one kernel: registers for each thread, bytes of stack and spills."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True)
class Compiled:
    """The result of a compilation that nothing will load."""

    ptx: str
    resources: dict[str, Resources]
    log: str


def build(source: Path, name: str, generated: Mapping[str, str], arch: str) -> Path:
    """The shared library of a kernel source, from the cache or compiled into it.

    Args:
        source: the .cu file.
        name: of the operator; names the library.
        generated: text by file name of headers that no file holds.
        arch: such as sm_90.
    Returns:
        The path of <name>.so, beside its manifest.json; its bytes are those that were compiled.
    Raises:
        BackendError: it is not in the cache and cannot be compiled, or the cache is not writable.
    """
    found = find(source, name, generated, arch)
    if found is not None:
        return found
    try:
        # A source edited while it is compiled would lie under the digest of its older text.
        while True:
            folder = _folder(source, name, generated, arch)
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _lock(folder):
                if _intact(folder, name):
                    return folder / f"{name}.so"
                _compile(source, name, generated, arch, folder)
            if folder == _folder(source, name, generated, arch):
                return folder / f"{name}.so"
    except OSError as error:
        raise BackendError(
            f"{name}: {CACHE_VARIABLE} must be a writable folder with space left, "
            f"got {cache_folder()} ({error.strerror or error}); set it to one"
        ) from error


def find(source: Path, name: str, generated: Mapping[str, str], arch: str) -> Path | None:
    """The library that the wheel brought, or one in the cache, or None.

    Without nvcc, the newest compiler's entry of the same source serves: `rlk build` on another
    machine may have filled the cache.
    """
    library, _ = prebuilt.examine(source, name, generated, arch)
    return library or _cached(source, name, generated, arch)


def _cached(source: Path, name: str, generated: Mapping[str, str], arch: str) -> Path | None:
    if toolchain.nvcc_missing() is None:
        folders = [_folder(source, name, generated, arch)]
    else:
        stem = _stem(source, name, generated, arch)
        folders = sorted(cache_folder().glob(f"{stem}-nvcc*"), key=_release, reverse=True)
    return next((f / f"{name}.so" for f in folders if _intact(f, name)), None)


def missing(source: Path, name: str, generated: Mapping[str, str], arch: str) -> str | None:
    """In one clause, why there is no binary and nothing to compile one, or None."""
    lack = toolchain.nvcc_missing()
    if lack is None or find(source, name, generated, arch) is not None:
        return None
    _, verdict = prebuilt.examine(source, name, generated, arch)
    return f"of prebuilt kernels, {verdict}; it {lack}"


def explain(
    source: Path, name: str, generated: Mapping[str, str], arch: str | None
) -> list[tuple[str, str]]:
    """Where a binary may come from, in the order of preference, and whether it does.

    Args:
        source, name, generated: as for `build`.
        arch: of the GPU; None where there is none.
    """
    library, verdict = prebuilt.examine(source, name, generated, arch)
    places = [("prebuilt", verdict, library is not None)]
    lack = toolchain.nvcc_missing()
    held = arch is not None and _cached(source, name, generated, arch) is not None
    places.append(("cache", f"{cache_folder()} holds {arch if held else 'none'}", held))
    path = "" if lack else toolchain.nvcc(name)
    compiles = f"nvcc {toolchain.nvcc_release(path)} at {path}" if path else f"it {lack}"
    places.append(("compiler", compiles, bool(path)))
    chosen = next((place for place, _, serves in places if serves), "")
    return [
        (place, f"chosen: {verdict}" if place == chosen else verdict)
        for place, verdict, _ in places
    ]


def compile_only(source: Path, name: str, generated: Mapping[str, str], arch: str) -> Compiled:
    """Compile a kernel source to PTX and machine code that are not kept.

    Args:
        source, name, generated, arch: as for `build`.
    Raises:
        BackendError: it does not compile; the message holds the end of the compiler's output.
    """
    with tempfile.TemporaryDirectory(prefix="rlk-") as made:
        folder = Path(made)
        _write(folder, generated)
        command = [*_nvcc(source, name), *toolchain.compile_flags(arch), str(source.absolute())]
        log = run([*command, "-cubin", "--keep", "-o", "kernel.cubin"], folder, source)
        (ptx,) = folder.glob("*.ptx")
        return Compiled(ptx.read_text(), resources_in(log), log)


def resources(library: Path) -> dict[str, Resources]:
    """Registers and spills of every kernel of an entry, by mangled name; a wheel's has none."""
    return resources_in(read_manifest(library.parent).get("log", ""))


def resources_in(log: str) -> dict[str, Resources]:
    """The same of a log of ptxas."""
    pattern = re.compile(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers",
        re.DOTALL,
    )
    return {
        kernel: Resources(int(registers), int(stack), int(stores), int(loads))
        for kernel, stack, stores, loads, registers in pattern.findall(log)
    }


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an entry: digest, flags and log."""
    return json.loads((folder / sources.MANIFEST).read_text())


def cache_folder() -> Path:
    """Where entries live: RLK_CACHE_DIR, or else ~/.cache/rlk."""
    chosen = os.environ.get(CACHE_VARIABLE)
    try:
        return Path(chosen).absolute() if chosen else Path.home() / ".cache" / "rlk"
    except RuntimeError as error:
        raise BackendError(
            f"build: {CACHE_VARIABLE} must name a folder where there is no home, got none; set it"
        ) from error


def _stem(source: Path, name: str, generated: Mapping[str, str], arch: str) -> str:
    digest = sources.digest(source, name, generated, toolchain.compile_flags(arch))
    return f"{name}-{arch}-{digest[:32]}"


def _folder(source: Path, name: str, generated: Mapping[str, str], arch: str) -> Path:
    release = toolchain.nvcc_release(toolchain.nvcc(name))
    return cache_folder() / f"{_stem(source, name, generated, arch)}-nvcc{release}"


def _release(folder: Path) -> list[int]:
    return [int(part) for part in folder.name.rpartition("-nvcc")[2].split(".") if part.isdigit()]


def _intact(folder: Path, name: str) -> bool:
    """Whether an entry is complete and its binary the one that was compiled."""
    try:
        expected = read_manifest(folder)["digest"]
        return hashlib.sha256((folder / f"{name}.so").read_bytes()).hexdigest() == expected
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Let one process build an entry while others wait; the kernel frees it if that one dies.

    Only to spare work: a file system without locks costs repeated builds, not wrong ones.
    """
    with open(folder.parent / f".{folder.name}.lock", "w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(
    source: Path, name: str, generated: Mapping[str, str], arch: str, folder: Path
) -> None:
    """Build an entry in a folder beside it and rename it into place."""
    _remove_abandoned(folder)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        entry = temporary / "entry"
        entry.mkdir()
        _write(temporary, generated)
        flags = toolchain.compile_flags(arch)
        library = entry / f"{name}.so"
        rules = ninja_rules([*_nvcc(source, name), *flags], source, f"entry/{name}.so")
        (temporary / "build.ninja").write_text(rules)
        log = run([*toolchain.ninja(), "--quiet"], temporary, source)
        digest = hashlib.sha256(library.read_bytes()).hexdigest()
        manifest = {"digest": digest, "flags": flags, "log": log, "source": source.name}
        (entry / sources.MANIFEST).write_text(json.dumps(manifest, indent=1))
        _publish(entry, folder, name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _publish(entry: Path, folder: Path, name: str) -> None:
    """Rename a finished entry into place, replacing only a damaged one."""
    while True:
        try:
            entry.rename(folder)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        if _intact(folder, name):
            return
        with contextlib.suppress(FileNotFoundError):
            folder.rename(entry.with_name("damaged"))


def _remove_abandoned(folder: Path) -> None:
    """Remove what killed builds left."""
    for leftover in folder.parent.glob(".*.*/"):
        with contextlib.suppress(OSError):
            if leftover.is_dir() and time.time() - leftover.stat().st_mtime > _ABANDONED_AFTER:
                shutil.rmtree(leftover, ignore_errors=True)


def _write(folder: Path, generated: Mapping[str, str]) -> None:
    for name, text in generated.items():
        (folder / name).write_text(text)


def _nvcc(source: Path, name: str) -> list[str]:
    """The command of nvcc up to its flags, run where the generated headers lie.

    Paths are relative where they can be: nvcc does not quote those it hands to g++.
    """
    roots = [f"-I{root}" for root in (".", *sources.include_roots(source))]
    return [toolchain.nvcc(name), "-ccbin", toolchain.host_compiler(), *roots]


def ninja_rules(
    compile_command: list[str], source: Path, library: str, link_flags: Sequence[str] = ()
) -> str:
    """The ninja file: nvcc compiles, g++ links."""
    link_command = [toolchain.host_compiler(), *toolchain.LINK_FLAGS, *link_flags]
    libraries = toolchain.link_libraries(compile_command[0])

    def escaped(words: Sequence[str]) -> str:
        return shlex.join(words).replace("$", "$$")

    path = re.sub(r"([$ :])", r"$\1", str(source.absolute()))
    return "\n".join(
        [
            f"rule compile\n  command = {escaped(compile_command)} -c $in -o $out",
            f"rule link\n  command = {escaped(link_command)} $in -o $out {escaped(libraries)}",
            f"build kernel.o: compile {path}",
            f"build {library}: link kernel.o",
            "",
        ]
    )


def run(command: list[str], folder: Path, source: Path) -> str:
    """The output of a compiler.

    Raises:
        BackendError: it fails; the message holds the end of its output.
    """
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            errors="replace",
            env=toolchain.environment(),
        )
    except OSError as error:
        raise BackendError(f"build: {command[0]} must run, got {error.strerror}") from error
    if done.returncode != 0:
        shown = "\n".join(done.stdout.splitlines()[-_SHOWN_LINES:])
        # A compiler whose output found no room may name its missing output instead.
        if "No space left" in shown or shutil.disk_usage(folder).free < _BUILD_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise BackendError(f"build: {source} must compile, got\n{shown}")
    return done.stdout
