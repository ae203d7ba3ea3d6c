# SPDX-License-Identifier: Apache-2.0
"""The README's example is true."""

import re
from pathlib import Path

README = Path(__file__).resolve().parents[3] / "README.md"


def test_readme_every_example_runs_and_its_assertions_hold():
    examples = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert examples
    for example in examples:
        assert "assert " in example
        exec(compile(example, str(README), "exec"), {})
