# SPDX-License-Identifier: Apache-2.0
"""The examples where a library that they need is absent."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
RUN = """
import runpy, sys
sys.modules[sys.argv.pop(1)] = None
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("example", "arguments", "library", "distribution"),
    [
        ("qwen3next_norms", (), "transformers", "rlk-qwen3next[transformers]"),
        ("qwenimage_adaln", (), "diffusers", "rlk-qwenimage[diffusers]"),
        ("train_invariant", (), "transformers", "rlk-qwen3next[transformers]"),
        ("train_invariant", ("--model", "qwenimage"), "diffusers", "rlk-qwenimage[diffusers]"),
    ],
)
def test_example_without_its_library_ends_in_one_sentence(
    example, arguments, library, distribution
):
    path = EXAMPLES / f"{example}.py"
    code = f"import sys; sys.argv[0] = {str(path)!r}; sys.path.insert(0, {str(EXAMPLES)!r}){RUN}"
    command = [sys.executable, "-c", code, library, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"{example}: {library} must be installed, got none; "
        f'pip install "./packages/{distribution}"\n'
    )
