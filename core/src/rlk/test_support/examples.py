# SPDX-License-Identifier: Apache-2.0
"""A program of examples/ as a module whose parts a test replaces."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def load_example(file: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A program read anew, which finds the modules beside it until the test ends."""
    monkeypatch.syspath_prepend(str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} must be a Python file")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)
    spec.loader.exec_module(module)
    return module
