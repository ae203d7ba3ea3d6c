# SPDX-License-Identifier: Apache-2.0
"""Every rule reports its planted violation, and nothing else does."""

import subprocess

import pytest
from check_structure import RULES, check, main

HEADER = "# SPDX-License-Identifier: Apache-2.0\n"
CORE = "core/src/rlk"
TOY = "packages/rlk-toy/src/rlk_toy"
OPERATOR = f"{TOY}/fold"
PUBLIC = '''
__all__ = ["fold"]


def fold(x, start=0):
    """The sum of x.

    Args:
        x: numbers.
        start: added first.
    Returns:
        The sum.
    Raises:
        ArgumentError: x is empty.
    """
    return sum(x, start)
'''
CLEAN = {
    f"{CORE}/__init__.py": HEADER,
    f"{CORE}/py.typed": "",
    f"{TOY}/__init__.py": f'{HEADER}from .fold import fold\n\n__all__ = ["fold"]\n',
    f"{TOY}/py.typed": "",
    f"{TOY}/patching/sites.py": HEADER + 'NAMES = ["fold"]\n',
    f"{OPERATOR}/__init__.py": HEADER + PUBLIC,
    f"{OPERATOR}/operator.py": HEADER + 'NAME = "fold"\n',
    f"{OPERATOR}/oracle.py": HEADER,
    f"{OPERATOR}/golden.py": HEADER,
    f"{OPERATOR}/kernel_triton.py": HEADER,
    f"{OPERATOR}/test_fold.py": HEADER,
    f"{OPERATOR}/page.md": "# fold\n",
}


@pytest.fixture
def plant(tmp_path):
    """Write the clean tree with changes; None removes a file. Returns what the rules report."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)

    def write(changes):
        for path, text in {**CLEAN, **changes}.items():
            if text is not None:
                (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / path).write_text(text)
        return [(violation.rule, violation.path) for violation in check(tmp_path)]

    return write


def test_structure_clean_tree_reports_nothing(plant):
    assert plant({}) == []


A, B = f"{CORE}/a.py", f"{TOY}/b.py"
LONG_FUNCTION = "def long():\n" + "    x = 1\n" * 60


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        ("file-length", A, HEADER + "\n" * 400),
        ("function-length", A, HEADER + LONG_FUNCTION),
        ("licence-header", A, '"""No licence."""\n'),
        ("licence-header", "ci/check.sh", "set -e\n"),
        ("licence-header", ".ci/run", "#!/bin/bash\nset -e\n"),
        ("licence-header", f"{OPERATOR}/kernel_cuda.cu", "// kernel\n"),
        ("vague-name", f"{CORE}/utils.py", HEADER),
        ("vague-name", f"{CORE}/common/a.py", HEADER),
        ("test-name", f"{CORE}/test_a.py", HEADER + "def test_it():\n    pass\n"),
        ("shipped-code", A, HEADER + "from urllib.request import urlopen\n"),
        ("shipped-code", B, HEADER + "import pickle\n"),
        ("shipped-code", A, HEADER + "eval(text)\n"),
        ("shipped-code", A, HEADER + "torch.load(path)\n"),
        ("result-file", "bench.csv", "a,b\n"),
        ("result-file", "docs/records/raw.npz", "x"),
        ("result-file", "out.json", '{"schema": "rlk/report-1", "records": []}'),
        ("literal-tolerance", A, HEADER + "f(a, atol=0.1)\n"),
        ("literal-tolerance", A, HEADER + "RTOL = 2 * 1e-3\n"),
        ("literal-tolerance", A, HEADER + "bound: dict = {'max_ulp': 2}\n"),
        ("literal-tolerance", A, HEADER + "def f(a, tol=-1.0):\n    pass\n"),
        ("literal-tolerance", A, HEADER + "def f(*, grad_tolerance=(1, 2)):\n    pass\n"),
        ("literal-tolerance", f"{CORE}/test_a.py", HEADER + "assert (a - b).abs() < 0.1\n"),
        ("literal-tolerance", f"{CORE}/test_a.py", HEADER + "assert abs(a - b) <= 0.1\n"),
        ("literal-tolerance", f"{CORE}/test_a.py", HEADER + "assert max_ulps <= 1\n"),
        ("literal-tolerance", f"{CORE}/test_a.py", HEADER + "torch.allclose(a, b)\n"),
        ("literal-tolerance", f"{CORE}/test_a.py", HEADER + "assert a == approx(b, rel=0.1)\n"),
        ("literal-tolerance", "ci/bounds.json", '{"atol": 0.1}'),
        ("dotted-import-string", A, HEADER + 'import_module("package.module")\n'),
        ("dotted-import-string", A, HEADER + 'BACKEND = "rlk.backends"\n'),
        ("dotted-import-string", B, HEADER + 'load("rlk_toy.plugins:forward")\n'),
        ("dotted-import-string", f"{CORE}/test_a.py", HEADER + 'setattr("rlk.backends", 1)\n'),
        ("one-way-import", A, HEADER + "import rlk_toy\n"),
        ("one-way-import", f"{CORE}/test_a.py", HEADER + "from rlk_toy.fold import fold\n"),
        ("one-way-import", B, HEADER + "from rlk_other import norm\n"),
        ("model-name", A, HEADER + "# as in Qwen\n"),
        ("model-name", "core/README.md", "for qwen\n"),
        ("operator-name", A, HEADER + 'NAMES = ["fold"]\n'),
        ("operator-name", A, HEADER + 'raise ValueError("fold: x must be a row")\n'),
        ("operator-name", B, HEADER + "from rlk_toy.fold import x\n"),
        ("operator-name", "tools/a.py", HEADER + "package.fold(x)\n"),
        ("operator-folder", f"{OPERATOR}/oracle.py", None),
        ("operator-folder", f"{OPERATOR}/golden.py", None),
        ("operator-folder", f"{OPERATOR}/kernel_triton.py", None),
        ("operator-folder", f"{OPERATOR}/test_fold.py", None),
        ("operator-folder", f"{OPERATOR}/page.md", None),
        ("typed-marker", f"{TOY}/py.typed", None),
        ("drawn-tree", "ARCHITECTURE.md", "## Tree\n\n```text\n  a.py    words\n```\n"),
        ("public-docstring", f"{OPERATOR}/__init__.py", HEADER + PUBLIC.replace("Raises:", "")),
        ("public-docstring", f"{OPERATOR}/__init__.py", HEADER + PUBLIC.replace("Returns:", "")),
        ("public-docstring", f"{OPERATOR}/__init__.py", HEADER + PUBLIC.replace("Args:", "")),
        ("public-docstring", f"{OPERATOR}/__init__.py", HEADER + PUBLIC.replace("start:", "a:")),
        ("public-docstring", f"{OPERATOR}/__init__.py", HEADER + PUBLIC.replace("fold(x", "f(x")),
        (
            "public-docstring",
            f"{CORE}/__init__.py",
            f'{HEADER}__all__ = ["Row"]\n\n\nclass Row:\n    size = 1\n',
        ),
    ],
    ids=lambda value: value if value and "\n" not in value else "text",
)
def test_structure_planted_violation_is_reported_by_its_rule_alone(plant, rule, path, text):
    found = plant({path: text})
    assert {name for name, _ in found} == {rule}
    if text is not None:
        assert path in {where for _, where in found}


@pytest.mark.parametrize(
    ("drawn", "found"),
    [
        ("a.py math/row/", []),
        ("a.py", ["core/src/rlk/math/ is missing"]),
        ("math/", ["core/src/rlk/a.py is missing"]),
        ("a.py b.py math/", ["b.py is not there"]),
    ],
)
def test_structure_drawn_tree_must_be_the_one_that_is_there(plant, tmp_path, drawn, found):
    page = f"a.py\n\n## Tree\n\n```text\n{CORE}/\n  {drawn}    words\n```\n\nmath/\n"
    plant({A: HEADER, f"{CORE}/math/row/b.cu": f"// {HEADER}", "ARCHITECTURE.md": page})
    assert [v.message for v in check(tmp_path) if v.rule == "drawn-tree"] == found


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (A, HEADER + "\n" * 399),
        (A, HEADER + "torch.load(path, weights_only=True)\nmodel.eval()\n"),
        (f"{CORE}/test_a.py", HEADER + "import pickle\n"),
        (f"{CORE}/contract/contract.json", '{"atol": 0.1}'),
        ("docs/records/h200/gate.json", '{"records": [{"atol": 0.1}]}'),
        (A, HEADER + "def judge(a, b, atol, rtol):\n    return close(a, b, atol=atol)\n"),
        (A, HEADER + 'GROUP = "rlk.operators"\nrun([python, "-m", "rlk.manifest"])\n'),
        (f"{CORE}/test_a.py", HEADER + 'assert "rlk.backends" not in sys.modules\n'),
        (A, HEADER + 'HEADER = "rlk_fold.h"\n'),
        (A, HEADER + "assert error_count > 0\n"),
        (f"{CORE}/test_a.py", HEADER + 'NAME = "fold"\n'),
        (f"{CORE}/test_a.py", HEADER + "assert_close(a, b, **bounds)\n"),
        (A, HEADER + '"""Unlike fold, in two passes."""\n'),
        (B, HEADER + "from rlk import registry\n"),
    ],
)
def test_structure_permitted_text_reports_nothing(plant, path, text):
    assert plant({path: text}) == []


def test_operator_folder_variant_may_use_the_backends_of_its_base(plant):
    variant = f"{TOY}/shifted_fold"
    files = {
        f"{variant}/__init__.py": HEADER,
        f"{variant}/operator.py": HEADER + "from ..fold.operator import OPERATOR\n",
        f"{variant}/oracle.py": HEADER,
        f"{variant}/test_shifted_fold.py": HEADER,
        f"{variant}/page.md": "# shifted_fold\n",
    }
    assert plant(files) == []
    independent = HEADER + "from rlk.operator import Operator\n"
    found = plant({**files, f"{variant}/operator.py": independent})
    assert found == [("operator-folder", f"{variant}/operator.py")] * 2


def test_public_docstring_exported_module_is_followed(plant):
    init = HEADER + 'from rlk import sums\n\n__all__ = ["sums"]\n'
    module = HEADER + '"""Sums."""\n__all__ = ["total"]\n\n\ndef total():\n    pass\n'
    found = plant({f"{CORE}/__init__.py": init, f"{CORE}/sums/__init__.py": module})
    assert found == [("public-docstring", f"{CORE}/sums/__init__.py")]


def test_public_docstring_signature_of_an_overload_needs_none(plant):
    head = HEADER + '"""Sums."""\nfrom typing import overload\n\n__all__ = ["total"]\n\n\n'
    alone = "@overload\ndef total(x: int) -> int: ...\n\n\n"
    described = 'def total(x):\n    """x.\n\n    Args:\n        x: it.\n    Returns:\n        x.\n'
    whole = head + alone + described + '    Raises:\n        None: never.\n    """\n'
    assert plant({f"{CORE}/__init__.py": whole}) == []
    bare = whole.replace("@overload\n", "")
    assert plant({f"{CORE}/__init__.py": bare}) == [("public-docstring", f"{CORE}/__init__.py")]


def test_rules_every_one_has_a_planted_violation():
    planted = test_structure_planted_violation_is_reported_by_its_rule_alone.pytestmark[0].args[1]
    assert {rule for rule, *_ in planted} == {rule.__name__.replace("_", "-") for rule in RULES}


def test_command_violation_is_printed_and_exits_1(plant, tmp_path, capsys):
    plant({f"{CORE}/utils.py": HEADER})
    assert main([str(tmp_path)]) == 1
    assert f"{CORE}/utils.py:1: vague-name: 'utils' says nothing" in capsys.readouterr().out
    (tmp_path / CORE / "utils.py").unlink()
    assert main([str(tmp_path)]) == 0
