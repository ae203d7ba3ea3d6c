# SPDX-License-Identifier: Apache-2.0
"""Installed wheels on a GPU, outside the checkout: prebuilt, compiled here, and Triton's kernels.

    python ci/install_gpu.py WHEELS RECORD [--device cpu]

Installs the wheels of a folder three times, without network: as they are with nvcc hidden, with
the prebuilt kernels removed, and with both. Every operator runs forward and backward, eager and
compiled, and must give the same bytes in all three. On a CPU, which a dry run may name, golden
computes and only the installations differ. Exit status 0 all equal, 1 something is not, 2 usage.

What the wheels require beside rlk comes from this Python and from the caller's PYTHONPATH, which
RLK_CALLERS_PYTHONPATH holds where a script has put sources in front; rlk itself from the wheels.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# name -> (prebuilt kernels stay, nvcc is found, the backend that must run)
WAYS = {
    "prebuilt": (True, False, "cuda"),
    "compiled": (False, True, "cuda"),
    "triton": (False, False, "triton"),
}
DTYPES = ("float32", "bfloat16", "float16")


def main(wheels: Path, record: Path, device: str) -> int:
    """Install, run and compare; the exit status."""
    found = sorted(wheels.glob("rlk_*.whl"))
    if not any("manylinux" in wheel.name for wheel in found):
        print(f"install_gpu: {wheels} must hold wheels with kernels, got {[w.name for w in found]}")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        sites = {way: install(found, work / way, prebuilt) for way, (prebuilt, *_) in WAYS.items()}
        # Threads: each waits for a process of its own.
        with ThreadPoolExecutor(len(WAYS)) as pool:
            waiting = {way: pool.submit(run, sites[way], way, device) for way in WAYS}
            runs = {way: future.result() for way, future in waiting.items()}
    results = {way: one["results"] for way, one in runs.items()}
    lines = differing(results)
    print(*lines, sep="\n" if lines else "", end="\n" if lines else "")
    content = {
        "schema": "rlk.install/1",
        "origin": runs["prebuilt"]["origin"],
        "wheels": {wheel.name: sha256(wheel.read_bytes()) for wheel in found},
        "rows": [row for way, one in results.items() for row in rows(way, device, one)],
    }
    record.write_text(json.dumps(content, indent=1) + "\n")
    count = len(results["prebuilt"])
    print(f"{count} results of each of {', '.join(results)}: {len(lines)} differ")
    return 1 if lines or not count else 0


def differing(results: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A line for each result that a way lacks, has alone, or has with other bytes."""
    first = results["prebuilt"]
    return [
        f"{case}: {way} must equal prebuilt, got {others.get(case)}, {first.get(case)}"
        for way, others in results.items()
        for case in sorted({*first, *others})
        if others.get(case) != first.get(case)
    ]


def rows(way: str, device: str, results: Mapping[str, str]) -> list[dict[str, Any]]:
    """A row for each operator: how many results it gave, and one digest of all of them."""
    operators: dict[str, list[str]] = {}
    for case, digest in results.items():
        operators.setdefault(case.partition("/")[0], []).append(f"{case} {digest}\n")
    backend = backend_of(way, device)
    return [
        {"operator": name, "way": way, "backend": backend, "results": len(lines),
         "digest": sha256("".join(lines).encode())}
        for name, lines in operators.items()
    ]  # fmt: skip


def sha256(data: bytes) -> str:
    """In hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def backend_of(way: str, device: str) -> str:
    """The backend that must run."""
    return "golden" if device == "cpu" else WAYS[way][2]


def install(wheels: list[Path], folder: Path, prebuilt: bool) -> Path:
    """A folder to import from, which holds the wheels alone."""
    site = folder / "site"
    options = ["--quiet", "--no-index", "--no-deps", "--target", str(site)]
    command = [sys.executable, "-m", "pip", "install", *options, *map(str, wheels)]
    subprocess.run(command, check=True)
    held = [path for path in site.rglob("prebuilt") if path.is_dir()]
    if not held:
        raise SystemExit(f"install_gpu: the wheels must bring prebuilt kernels, got none in {site}")
    for path in [] if prebuilt else held:
        shutil.rmtree(path)
    return site


def run(site: Path, way: str, device: str) -> dict[str, Any]:
    """What a process of this installation computes, and where: digests by tensor, the origin."""
    nvcc = WAYS[way][1]
    callers = os.environ.get("RLK_CALLERS_PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(site), *filter(None, [callers])])
    environment["RLK_CACHE_DIR"] = str(site.parent / "cache")
    # Triton brings a ptxas of its own; nothing else of the toolkit is needed without nvcc.
    if not nvcc:
        environment["CUDA_HOME"] = str(site.parent / "no-toolkit")
    command = [sys.executable, __file__, "--run", way, backend_of(way, device), device]
    done = subprocess.run(command, cwd=site.parent, env=environment, stdout=subprocess.PIPE)
    if done.returncode != 0:
        raise SystemExit(f"install_gpu: the run {way} ended with status {done.returncode}")
    return json.loads(done.stdout)


def child(way: str, backend: str, device: str) -> None:
    """Run every operator of this process's installation and print digests and origin."""
    import msgspec
    import torch

    import rlk
    from rlk import dispatch, records, registry
    from rlk.cuda import build, cache, kernels, launch, prebuilt, toolchain

    require_installed(rlk.__name__)
    keeps, nvcc, _ = WAYS[way]
    require(nvcc or toolchain.nvcc_missing() is not None, "nvcc must be hidden")
    arch = launch.device_arch(0) if device == "cuda" else "sm_90"
    operators = {o.name: o for o in registry.operators().values() if o.backend(backend)}
    for package in {o.package for o in operators.values()}:
        require_installed(package)
    sources: dict[Path, Any] = {}
    for operator in operators.values():
        row = operator.backend(kernels.BACKEND)
        for one in kernels.launched_by(row.load()) if row else ():
            sources[one.source] = one
    for one in sources.values():
        name = kernels.name_of(one)
        library, verdict = prebuilt.examine(one.source, name, one.generated, arch)
        require((library is not None) == keeps, f"{name}: prebuilt kernels must fit: {verdict}")
    if nvcc and device == "cuda":
        # Side by side, instead of one after another at first calls.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda one: one.binary(arch), sources.values()))
    for operator in operators.values() if device == "cuda" else ():
        auto = dispatch.choose(operator, torch.device(device), dispatch.AUTO).backend.name
        wanted = "triton" if way == "triton" else operator.backends[0].name
        require(auto == wanted, f"{operator.name}: auto must choose {wanted}, got {auto}")
    results = computed(operators, backend, device)
    held = len(list(cache.entries()))
    count = 0 if device == "cpu" or not nvcc else len(sources)
    require(held == count, f"{build.cache_folder()} must hold {count} binaries, got {held}")
    made = records.origin(command="ci/install_gpu.py")
    print(json.dumps({"results": results, "origin": msgspec.to_builtins(made)}))


def computed(operators: Mapping[str, Any], backend: str, device: str) -> dict[str, str]:
    """Digests by operator, dtype, mode and tensor; compiled ones must equal eager ones."""
    import torch

    from rlk import cli, registry
    from rlk.cli.public_run import run as run_public

    results = {}
    exported = registry.public_function
    for name, operator in operators.items():
        for dtype in DTYPES:
            batch = cli.check.__globals__["_inputs"](operator, dtype, None, 1)
            for mode in ("eager", "compiled"):
                torch._dynamo.reset()
                function = exported(operator)
                if mode == "compiled":
                    function = torch.compile(function, fullgraph=True, backend="aot_eager")
                registry.public_function = lambda _, chosen=function: chosen
                found = run_public(operator, batch, torch.device(device), backend, grad=True)
                require(found.backends == {backend}, f"{name} must run {backend}: {found.backends}")
                for tensor, value in found.tensors.items():
                    data = value.contiguous().cpu().view(torch.uint8).numpy().tobytes()
                    key = f"{name}/{dtype}/{mode}/{tensor}"
                    results[key] = hashlib.sha256(data).hexdigest()[:16]
    for key, digest in results.items():
        eager = results[key.replace("/compiled/", "/eager/")]
        require(digest == eager, f"{key} must equal eager, got {digest}, {eager}")
    return results


def require_installed(name: str) -> None:
    """End this process unless a module is of its installation, which its folder holds."""
    file = str(sys.modules[name].__file__)
    inside = Path(file).resolve().is_relative_to(Path.cwd().resolve())
    require(inside, f"{name} must come from the installation, got {file}")


def require(holds: bool, what: str) -> None:
    """End this process unless something holds."""
    if not holds:
        raise SystemExit(f"install_gpu: {what}")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["--run"]:
        child(*arguments[1:])
    elif len(arguments) in (2, 4) and arguments[2:3] in ([], ["--device"]):
        place = arguments[3] if arguments[2:] else "cuda"
        folders = [Path(argument).absolute() for argument in arguments[:2]]
        sys.exit(main(*folders, place))
    else:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
