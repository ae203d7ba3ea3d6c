# SPDX-License-Identifier: Apache-2.0
"""Which steps run, how launches find theirs, and whole runs of a program in the place of ncu."""

import pytest
import torch
from msgspec.structs import replace

from rlk.bench import ncu, profile
from rlk.errors import BackendError
from rlk.operator import Backend, Workload
from rlk.records import decode
from rlk.test_support import tiny_operator
from rlk.test_support.fake_ncu import fake_ncu, raw_page

SIZES = {"T": 3, "N": 4}
OPERATOR = tiny_operator(
    "tiny_profile",
    workloads=(
        Workload("here", SIZES),
        Workload("there", SIZES),
        Workload("far", {"T": 5, "N": 4}),
    ),
    backends=tuple(
        Backend(name, lambda: None, ("nvidia",)) for name in ("cuda", "triton", "golden")
    ),
)
FACTS = {
    "packages": {}, "device": "GPU", "driver": None, "compute_capability": "9.0", "python": "3",
    "torch": "2", "triton": None, "cuda": None,
}  # fmt: skip
PLAN = [("3x4", "cuda"), ("3x4", "triton"), ("5x4", "cuda"), ("5x4", "triton")]


class Product(torch.autograd.Function):
    """x * weight, which notes what ran, and whether in threads of autograd."""

    events: list = []

    @staticmethod
    def forward(ctx, x, weight):
        Product.events.append("forward")
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, dy):
        threads = torch._C._is_multithreading_enabled()
        Product.events.append("backward in threads" if threads else "backward")
        x, weight = ctx.saved_tensors
        return dy * weight, (dy * x).sum(0)


@pytest.fixture
def gpu(monkeypatch):
    """A machine on which both backends of the tiny operator run, on its CPU; the refused ones."""
    refused = set()

    def call(operator, backend, told):
        if backend in refused:
            raise BackendError(f"no {backend}")
        return Product.apply

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(profile, "DEVICE", "cpu")
    monkeypatch.setattr(profile, "public_call", call)
    monkeypatch.setattr(profile.select, "every", lambda: [OPERATOR])
    made = profile.origin(facts=FACTS)
    monkeypatch.setattr(profile, "origin", lambda command: replace(made, command=command))
    return refused


def steps_of(*numbers, each=1):
    """A CSV in which each of these steps has so many launches."""
    head, *lines = (
        raw_page({ncu.METRICS["duration_us"]: "ns"}, *[[f"{n}000"]] * each, step=n) for n in numbers
    )
    rows = [line for text in lines for line in text.splitlines() if line[1:2].isdigit()]
    return head + "\n".join(rows)


def labels(plan):
    return [(work.label, backend) for work, backend in plan]


def test_plan_has_each_workload_once_with_each_backend_of_ours(gpu):
    assert labels(profile.planned([], [])) == PLAN
    assert labels(profile.planned([], [7]))[2:4] == [("7x4", "cuda"), ("7x4", "triton")]
    # Numbers of steps are places in it: they stay where a backend does not run.
    gpu.add("triton")
    assert labels(profile.planned([], [])) == PLAN


def test_backend_that_does_not_run_here_is_left_out_by_child_and_run(
    gpu, child, tmp_path, monkeypatch, capsys
):
    gpu.add("triton")
    profile.run_child(profile.planned([], []), (0, 1))
    ranges = [word for name, word in filter(lambda e: e[0] == "range_push", child)]
    assert ranges == [f"{ncu.STEP}{number}" for number in (0, 1, 4, 5)]
    fake_ncu(tmp_path, monkeypatch, steps_of(0, 1, 4, 5))
    assert profile.main(["--json", str(tmp_path / "profile.json")]) == 0
    record = decode((tmp_path / "profile.json").read_bytes())
    assert [(r.size, r.backend) for r in record.rows[::2]] == PLAN[::2]
    gpu.add("cuda")
    assert profile.main([]) == 2
    wanted = "rlk: profile: a backend of cuda, triton must run here, got none"
    assert capsys.readouterr().err.splitlines() == [wanted]


@pytest.fixture
def child(gpu, monkeypatch):
    """What a child has done so far: what it computed, and its calls of the profiler."""
    events = Product.events = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("end"))
    for module, name in (
        (torch.cuda.profiler, "start"), (torch.cuda.profiler, "stop"),
        (torch.cuda.nvtx, "range_push"), (torch.cuda.nvtx, "range_pop"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *word, name=name: events.append((name, *word)))
    return events


def test_child_runs_each_step_warm_in_the_range_of_its_number(child):
    profile.run_child(profile.planned([], []), (1, 2))

    def measured(step, number):
        start, stop = ("start",), ("stop",)
        return [step, start, ("range_push", f"{ncu.STEP}{number}"), step, ("range_pop",), stop]

    # The second of two workloads, on both backends; the first forward is that of the backward.
    assert child == [
        "forward", *measured("forward", 4), *measured("backward", 5), "end",
        "forward", *measured("forward", 6), *measured("backward", 7), "end",
    ]  # fmt: skip


def test_whole_run_leaves_a_record_of_every_launch(gpu, tmp_path, monkeypatch, capsys):
    said = fake_ncu(tmp_path, monkeypatch, steps_of(*range(8), each=2))
    file = tmp_path / "profile.json"
    assert profile.main(["--json", str(file)]) == 0
    record = decode(file.read_bytes())
    assert (record.ncu, record.interrupted) == ("2025.3.1.0", False)
    assert record.origin.command == "python -m rlk.bench.profile"
    assert [(r.size, r.backend, r.direction, r.launch, r.duration_us) for r in record.rows] == [
        (size, backend, direction, launch, float(2 * place + (direction == "backward")))
        for place, (size, backend) in enumerate(PLAN)
        for direction in ("forward", "backward")
        for launch in (1, 2)
    ]
    (call,) = said()
    assert call.endswith("-m rlk.bench.profile --child")
    out = capsys.readouterr().out
    assert "tiny_profile 5x4 bfloat16 contiguous" in out
    assert "2048x3x1" in out


def test_child_gets_the_operators_and_row_counts_of_the_run(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(profile.select, "named", lambda names: [OPERATOR])
    said = fake_ncu(tmp_path, monkeypatch, steps_of(0))
    assert profile.main(["tiny_profile", "--rows", "7", "--rows", "9"]) == 1
    assert said()[0].endswith("rlk.bench.profile tiny_profile --rows 7 --rows 9 --child")


def test_step_without_a_launch_is_named_and_its_record_is_interrupted(
    gpu, tmp_path, monkeypatch, capsys
):
    fake_ncu(tmp_path, monkeypatch, steps_of(0, 1, 2, 4, 5, 6, 7))
    assert profile.main(["--json", str(tmp_path / "profile.json")]) == 1
    words = (
        "rlk: profile: tiny_profile 3x4 contiguous triton backward must launch a kernel, got none"
    )
    assert capsys.readouterr().err.splitlines() == [words]
    assert decode((tmp_path / "profile.json").read_bytes()).interrupted


@pytest.mark.parametrize("number", ["8", "none"])
def test_launch_of_no_planned_step_is_refused(gpu, tmp_path, monkeypatch, capsys, number):
    log = steps_of(0).replace(f"{ncu.STEP}0", f"{ncu.STEP}{number}")
    fake_ncu(tmp_path, monkeypatch, log)
    assert profile.main(["--json", str(tmp_path / "profile.json")]) == 2
    assert "a launch must be in a step of 8, got row_kernel in" in capsys.readouterr().err
    assert not (tmp_path / "profile.json").exists()


def test_child_that_finds_no_gpu_is_quoted_through_ncu(gpu, tmp_path, monkeypatch, capsys):
    # The child is a process of its own, and this machine's.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    fake_ncu(tmp_path, monkeypatch, "", runs=True)
    assert profile.main([]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("rlk: profile: ncu must finish, got exit status 2: ")
    assert last.endswith("rlk: profile: the machine must have an NVIDIA GPU, got none")


def test_shares_of_the_children_that_compile_make_the_whole(monkeypatch):
    started = []

    class Process:
        def __init__(self, command, **_):
            started.append(command)

        def wait(self):
            started.append("waited")

    monkeypatch.setattr(profile.subprocess, "Popen", Process)
    profile.warm(["child"], 1)
    assert started == []
    profile.warm(["child"], 3)
    shares = [command[1:] for command in started if command != "waited"]
    assert shares == [["--share", str(i), "3"] for i in range(3)]
    assert started[3:] == ["waited"] * 3


def test_machine_without_a_gpu_or_ncu_gets_one_sentence(gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert profile.main([]) == 2
    wanted = "rlk: profile: needs ncu, got none; install Nsight Compute"
    assert capsys.readouterr().err.splitlines() == [wanted]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert profile.main([]) == 2
    assert "the machine must have an NVIDIA GPU, got none" in capsys.readouterr().err
