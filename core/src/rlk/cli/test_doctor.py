# SPDX-License-Identifier: Apache-2.0
"""`rlk doctor` and `rlk show` on machines that have everything, and on ones that lack something."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlk import cli, registry
from rlk.cuda import build, kernels, prebuilt, toolchain
from rlk.test_support import install

doctor = cli.doctor.__globals__


@pytest.fixture
def findings(invoke, site, cache, monkeypatch):
    """What `rlk doctor` finds where core and `tiny_operators` are installed, and its status."""
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(kernels, "of_package", lambda package: [])

    def run():
        result = invoke("doctor", "--json")
        found = {
            f["what"]: (f["state"], f["found"], f["advice"]) for f in json.loads(result.stdout)
        }
        return result.exit_code, found

    return run


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def one_kernel(monkeypatch):
    """Gives core one kernel, of which `prebuilt.examine` says what it is told."""

    def use(verdict):
        one = SimpleNamespace(source=None, generated={}, operator=SimpleNamespace(name="one"))
        held = {"rlk": [one]}
        monkeypatch.setattr(kernels, "of_package", lambda package: held.get(package, []))
        monkeypatch.setattr(prebuilt, "examine", lambda *_: (None, verdict))

    return use


@pytest.fixture
def for_gpus(twice):
    """An operator without a backend for CPUs."""
    (golden,) = (b for b in twice.backends if b.name == "golden")
    on_gpus = replace(golden, platforms=("nvidia",), on_request=())
    return replace(twice, name="for_gpus", backends=(on_gpus,))


def test_doctor_of_a_working_machine_exits_zero_and_says_who_serves(findings):
    status, found = findings()
    assert status == 0
    assert found["torch"][:2] == ("ok", str(torch.__version__))
    assert found["cpu"] == ("ok", "CPU, served by golden", "")
    assert found["tiny-operators"][:2] == ("ok", "1.2")


def test_doctor_table_has_a_line_for_each_finding(invoke, findings):
    _, found = findings()
    table = invoke("doctor").stdout.splitlines()[2:]
    assert len(table) == len(found)


def test_doctor_python_and_torch_beyond_the_tested_range_are_untested(findings, monkeypatch):
    monkeypatch.setattr(doctor["platform"], "python_version", lambda: "3.99.0")
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    status, found = findings()
    assert status == 0
    assert found["python"] == ("untested", "3.99.0", "tested are 3.11 to 3.12")
    assert found["torch"] == ("untested", "2.9.1+cu128", "tested are 2.10 to 2.14")


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("2.9.1", "untested"), ("2.10.0", "ok"), ("2.14.9+cu130", "ok"), ("2.15.0", "untested"),
        ("unknown", "untested"),
    ],
)  # fmt: skip
def test_doctor_range_ends_with_its_newest_series(version, state):
    assert doctor["_in_range"]("torch", version, "").state == state


def test_doctor_machine_without_triton_says_how_to_get_it(findings, monkeypatch):
    monkeypatch.setattr(doctor["importlib"].util, "find_spec", lambda name: None)
    status, found = findings()
    assert (status, found["triton"][:2]) == (0, ("missing", "none"))
    assert 'pip install "rlk-core[triton]"' in found["triton"][2]


def test_doctor_package_that_does_not_import_exits_one(findings, twice, monkeypatch):
    failures = {"tiny_operators": ImportError("no module\nof this name")}
    monkeypatch.setattr(registry, "discover", lambda: ({}, failures))
    status, found = findings()
    assert status == 1
    assert found["tiny-operators"] == (
        "wrong", "1.2, which does not import", "no module of this name",
    )  # fmt: skip


def test_doctor_package_that_wants_another_core_exits_one(findings, tmp_path, monkeypatch):
    install(tmp_path, "fussy", {"__init__.py": ""}, version="1.0")
    (metadata,) = tmp_path.glob("fussy*.dist-info/METADATA")
    with metadata.open("a") as file:
        file.write("Requires-Dist: rlk-core>=99\nRequires-Dist: absent>=3; extra == 'more'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    status, found = findings()
    assert status == 1
    assert found["fussy"][0] == "wrong"
    assert found["fussy"][2].startswith('pip install "rlk-core>=99", got ')
    assert "absent" not in found["fussy"][2]


def test_doctor_library_beyond_the_range_of_an_extra_is_untested(findings, tmp_path, monkeypatch):
    install(tmp_path, "fussy", {"__init__.py": ""}, version="1.0")
    (metadata,) = tmp_path.glob("fussy*.dist-info/METADATA")
    with metadata.open("a") as file:
        file.write("Requires-Dist: pytest<1; extra == 'more'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    status, found = findings()
    assert (status, found["fussy"][0]) == (0, "untested")
    assert found["fussy"][2].startswith('pip install "pytest<1", got ')


def test_doctor_gpu_without_a_usable_backend_exits_one(findings, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    status, found = findings()
    assert status == 1
    assert found["nvidia"][:2] == ("wrong", "a GPU, served by nothing")
    assert found["nvidia"][2].startswith("twice: no backend can run on nvidia (quantum: ")


def test_doctor_operator_for_gpus_alone_is_no_fault_of_a_cpu(
    findings, twice, for_gpus, monkeypatch
):
    found = {"twice": twice, "for_gpus": for_gpus}
    monkeypatch.setattr(registry, "discover", lambda: (found, {}))
    status, found = findings()
    assert (status, found["cpu"]) == (0, ("ok", "CPU, served by golden; not for for_gpus", ""))


def test_doctor_cpu_that_no_operator_is_for_exits_one(findings, for_gpus, monkeypatch):
    monkeypatch.setattr(registry, "discover", lambda: ({"for_gpus": for_gpus}, {}))
    status, found = findings()
    assert (status, found["cpu"][:2]) == (1, ("wrong", "CPU, served by nothing"))
    assert found["cpu"][2].startswith("for_gpus: the device must be an NVIDIA GPU, got cpu; ")


def test_doctor_machine_without_nvcc_is_no_fault(findings, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    status, found = findings()
    assert (status, found["nvcc"][0]) == (0, "missing")
    assert found["nvcc"][1] == "needs nvcc 12.8 or newer, got none"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_doctor_on_a_cpu_says_of_everything_missing_what_it_is_for(findings, one_kernel):
    one_kernel("this installation brings none")
    _, found = findings()
    assert found["kernels of rlk"][2] == "not needed here: there is no GPU"
    assert found["nvidia"][2] == "only for operators on GPUs"
    assert [
        what for what, (state, _, advice) in found.items() if state != "ok" and not advice
    ] == []


@pytest.mark.parametrize(
    ("verdict", "state", "status"),
    [
        ("this installation brings none", "missing", 0),
        ("it was compiled from other sources than are installed", "wrong", 1),
        ("it is damaged (other bytes than were compiled); install the wheel again", "wrong", 1),
    ],
)
def test_doctor_stale_or_damaged_kernels_exit_one(findings, one_kernel, verdict, state, status):
    one_kernel(verdict)
    actual, found = findings()
    assert (actual, found["kernels of rlk"][0]) == (status, state)
    assert found["kernels of rlk"][1] == f"one: {verdict}"


def test_doctor_cache_that_is_not_writable_is_told(findings, cache, monkeypatch):
    cache.write_text("a file")
    _, found = findings()
    assert found["cache"][0] == "untested"
    assert "is not writable (File exists)" in found["cache"][1]
    assert found["cache"][2] == "set RLK_CACHE_DIR to a folder that is"


def test_show_explains_each_place_of_a_kernel(invoke, twice, cache, monkeypatch, tmp_path):
    from rlk import backends
    from rlk.reduce.exact_sum import kernel_cuda

    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    rows = (backends.cuda(lambda: kernel_cuda), *twice.backends)
    found = {"twice": replace(twice, backends=rows)}
    monkeypatch.setattr(registry, "discover", lambda: (found, {}))
    lines = invoke("show", "twice").stdout.splitlines()
    places = [" ".join(line.split()) for line in lines if line.startswith("exact_sum")]
    assert places == [
        "exact_sum prebuilt this installation brings none",
        f"exact_sum cache {cache} holds none",
        f"exact_sum compiler it {toolchain.nvcc_missing()}",
    ]
