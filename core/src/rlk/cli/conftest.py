# SPDX-License-Identifier: Apache-2.0
"""A package with one tiny operator, installed for these tests only."""

import importlib
import json
import os
import signal
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

import rlk
from rlk import interpreter, registry
from rlk.cli import app
from rlk.test_support import install

SCHEMA = json.loads((files("rlk") / "gates" / "report.schema.json").read_bytes())
FILES = {
    "__init__.py": "from .twice import twice\n",
    "twice/__init__.py": """
from rlk.publish import publish
from .operator import OPERATOR
_published = publish(OPERATOR)
def twice(x, *, backend=None):
    return _published((x,), {}, backend)[0]
""",
    "twice/operator.py": """
from rlk.operator import FLOATS, Backend, Claim, Operator, Tensor, Workload
from . import golden, oracle
OPERATOR = Operator(
    name="twice", package="tiny_operators", bits_version=3, formula="y = x + x",
    inputs=(Tensor("x", ("...", "N"), FLOATS, gradient="row"),), scalars=(),
    outputs=(Tensor("y", ("...", "N"), ("=x",)),), saved=(), reductions=(),
    category="elementwise",
    claims=(Claim("repeatable", ("y", "dx")), Claim("batch_invariant", ("y", "dx"))),
    workloads=(Workload("nowhere", {"T": 4, "N": 8}),), oracle=oracle.forward,
    backends=(
        Backend("quantum", lambda: None, ("cpu",), missing=lambda platform: "it needs qubits"),
        Backend("golden", lambda: golden, ("cpu",), on_request=("nvidia",)),
    ),
)
""",
    "twice/oracle.py": "def forward(x):\n    return (x + x,)\n",
    "twice/golden.py": """
from rlk.launch import start_golden
def forward(x):
    start_golden("twice_forward", __file__)
    return (x + x,)
def backward(dy, x, *, needs):
    start_golden("twice_backward", __file__)
    return (dy + dy,)
""",
}


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """A folder of packages, as site-packages is one, with the package `tiny_operators`."""
    folder = tmp_path_factory.mktemp("site")
    install(folder, "tiny_operators", FILES, version="1.2")
    return folder


@pytest.fixture(scope="session")
def twice(site):
    """The operator `twice`; torch lets it be published once per process."""
    sys.path.insert(0, str(site))
    importlib.import_module("tiny_operators")
    (operator,) = registry.declared_in("tiny_operators")
    sys.path.remove(str(site))
    return operator


@pytest.fixture
def invoke(monkeypatch, twice):
    """Runs `rlk` in this process, where `twice` is the only operator."""
    monkeypatch.setattr(registry, "discover", lambda: ({"twice": twice}, {}))
    # These tests run no Triton, and another test may have imported it to compile.
    monkeypatch.setattr(interpreter, "enable_without_gpu", lambda: False)
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def environment(site):
    """The environment of a process in which `tiny_operators` is installed."""
    core = str(Path(rlk.__file__).parents[1])
    path = os.pathsep.join([str(site), core, os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


@pytest.fixture
def interrupts():
    """Programs get interrupts, which what a shell runs in the background ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def program(environment, interrupts):
    """Starts `rlk` as a program of its own."""

    def start(*arguments, beside=None, **streams):
        searched = os.pathsep.join([str(beside or "."), environment["PYTHONPATH"]])
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "rlk.cli", *map(str, arguments)]
        env = {**environment, "PYTHONPATH": searched}
        return subprocess.Popen(command, env=env, **{**pipes, **streams})

    return start


@pytest.fixture
def report(tmp_path):
    """Where a run may leave its report, and how to read it back."""

    class File:
        path = tmp_path / "report.json"

        def read(self):
            document = json.loads(self.path.read_text())
            jsonschema.validate(document, SCHEMA)
            return document

    return File()
