# SPDX-License-Identifier: Apache-2.0
"""`rlk doctor`: what is here, what is missing, and what to do about it."""

import importlib.util
import json
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, entry_points
from typing import Annotated, Literal

import torch
import typer
from packaging.requirements import Requirement
from packaging.version import Version

from rlk import dispatch, registry
from rlk.cli import select
from rlk.cli.console import console, table
from rlk.cuda import build, cache, kernels, launch, prebuilt, toolchain
from rlk.errors import PlatformError, RlkError

# The ends of what was run, on the CPU by `hatch run compat:all` or on a GPU; both included.
TESTED = {
    "python": ("3.11", "3.12"),
    "torch": ("2.10", "2.14"),
    "triton": ("3.6", "3.9"),
}
_COLUMNS = ("what", "state", "found", "to do")


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `wrong` must be put right; `missing` and `untested` need not be."""

    what: str
    state: Literal["ok", "missing", "untested", "wrong"]
    found: str
    advice: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Look at this installation and machine; exit status 1 if something must be put right."""
    findings = [*_versions(), *_packages(), *_devices(), *_compiler(), *_kernels(), *_cache()]
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        rows = [(f.what, f.state, f.found, f.advice) for f in findings]
        console().print(table("", _COLUMNS, rows))
    raise typer.Exit(1 if any(f.state == "wrong" for f in findings) else 0)


def _versions() -> Iterator[Finding]:
    yield _in_range("python", platform.python_version(), "")
    yield _in_range("torch", str(torch.__version__), "")
    if importlib.util.find_spec("triton") is None:
        advice = 'pip install "rlk-core[triton]" for GPUs without prebuilt kernels or nvcc'
        yield Finding("triton", "missing", "none", advice)
    else:
        yield _in_range("triton", _version("triton") or "unknown", "")


def _in_range(what: str, found: str, where: str) -> Finding:
    """Judge a version by the tested range, whose last end is a series."""
    first, last = TESTED[what]
    numbers = found.split("+")[0]
    if not numbers[:1].isdigit():
        return Finding(what, "untested", found, f"tested are {first} to {last}")
    release = Version(numbers).release
    newest = Version(last).release
    if Version(first).release <= release and release[: len(newest)] <= newest:
        return Finding(what, "ok", found)
    return Finding(what, "untested", found, f"tested are {first} to {last}")


def _packages() -> Iterator[Finding]:
    """Core and operator packages: that they import, and have what their metadata requires."""
    _, failures = registry.discover()
    known = {"rlk-core": "rlk"}
    for entry in entry_points(group=registry.ENTRY_POINT_GROUP):
        if entry.dist is not None:
            known[entry.dist.name] = entry.value
    for name, package in sorted(known.items()):
        version = _version(name)
        if version is None:
            yield Finding(name, "wrong", "no metadata", f"pip install {name}")
        elif package in failures:
            error = " ".join(f"{failures[package]}".split())
            yield Finding(name, "wrong", f"{version}, which does not import", error)
        else:
            yield _requirements(distribution(name))
    if len(known) == 1:
        yield Finding("operators", "missing", "none", "pip install a package of operators")


def _requirements(installed: Distribution) -> Finding:
    """Whether they are met; those of an extra only where its library is there for other reasons."""
    state: Literal["ok", "untested", "wrong"] = "ok"
    lacks = []
    for text in installed.requires or ():
        wanted = Requirement(text)
        found = _version(wanted.name)
        optional = wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})
        if optional and (found is None or wanted.name in TESTED):
            continue
        if found is None or not wanted.specifier.contains(found, prereleases=True):
            lacks.append(f'pip install "{wanted.name}{wanted.specifier}", got {found or "none"}')
            state = "untested" if optional and state != "wrong" else "wrong"
    return Finding(installed.name, state, installed.version, "; ".join(lacks))


def _devices() -> Iterator[Finding]:
    """Who would compute on each kind of device."""
    operators = sorted(registry.discover()[0].items())
    for device in select.devices():
        place = dispatch.platform_of(device)
        found = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        elsewhere, without, serving = {}, [], set()
        for name, operator in operators:
            try:
                serving.add(dispatch.choose(operator, device, dispatch.AUTO).backend.name)
            except PlatformError as error:
                elsewhere[name] = str(error)
            except RlkError as error:
                without.append(str(error))
        found += f", served by {', '.join(sorted(serving)) or 'nothing'}"
        # An operator for GPUs alone is no fault of a CPU that computes the others.
        faults = without if serving else [*without, *elsewhere.values()]
        if serving and elsewhere:
            found += f"; not for {', '.join(elsewhere)}"
        yield Finding(place, "wrong" if faults else "ok", found, faults[0] if faults else "")
    if not torch.cuda.is_available():
        builds = torch.version.cuda or "no CUDA"
        advice = "only for operators on GPUs"
        yield Finding("nvidia", "missing", f"no GPU; torch is built for {builds}", advice)


def _compiler() -> Iterator[Finding]:
    lack = toolchain.nvcc_missing()
    if lack is not None:
        yield Finding("nvcc", "missing", lack.partition(";")[0], "only for kernels not prebuilt")
        return
    path = toolchain.nvcc("doctor")
    yield Finding("nvcc", "ok", f"{toolchain.nvcc_release(path)} at {path}")
    if shutil.which("g++") is None:
        yield Finding("g++", "wrong", "none", "install it: nvcc compiles host code with it")


def _kernels() -> Iterator[Finding]:
    """Which prebuilt kernels fit, by package; a stale or damaged one must be put right."""
    operators = registry.discover()[0].values()
    arch = launch.device_arch(0) if torch.cuda.is_available() else None
    for package in ("rlk", *sorted({operator.package for operator in operators})):
        reasons: dict[str, list[str]] = {}
        state: Literal["ok", "missing", "wrong"] = "missing"
        for one in kernels.of_package(package):
            name = kernels.name_of(one)
            library, verdict = prebuilt.examine(one.source, name, one.generated, arch)
            reasons.setdefault(verdict, []).append(name)
            if library is not None and state == "missing":
                state = "ok"
            elif "damaged" in verdict or "other sources" in verdict:
                state = "wrong"
        if reasons:
            found = "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
            yield Finding(f"kernels of {package}", state, found, _of_kernels(state, arch))


def _of_kernels(state: str, arch: str | None) -> str:
    """What to do about prebuilt kernels, on a machine with or without a GPU."""
    if state == "wrong":
        return "install wheels of core and this package of one release"
    if state == "ok":
        return ""
    if arch is None:
        return "not needed here: there is no GPU"
    return f"rlk build --all where nvcc is, or install wheels with kernels for {arch}"


def _cache() -> Iterator[Finding]:
    folder = build.cache_folder()
    held = list(cache.entries())
    size = sum(entry.size for entry in held) / 2**20
    found = f"{folder}: {len(held)} binaries, {size:.1f} MiB"
    unwritable = cache.unwritable()
    if unwritable is None:
        yield Finding("cache", "ok", found)
    else:
        advice = f"set {build.CACHE_VARIABLE} to a folder that is"
        yield Finding("cache", "untested", f"{folder} is not writable ({unwritable})", advice)


def _version(name: str) -> str | None:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None
