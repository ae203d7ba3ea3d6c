# SPDX-License-Identifier: Apache-2.0
"""Installed wheels: what a process of theirs imports, and what is kept of a run."""

import json
import subprocess
from types import SimpleNamespace

import install_gpu
import pytest
from msgspec import to_builtins

from rlk.records import load_folder, origin

DIGESTS = {
    "demo/float32/eager/y": "a",
    "demo/float32/eager/dx": "b",
    "other/float16/eager/y": "c",
}
WHEEL = "rlk_demo-1-py3-none-manylinux_2_34_x86_64.whl"


@pytest.mark.parametrize(
    ("callers", "own", "expected"),
    [
        ("/libraries", "/sources:/libraries", ":/libraries"),
        ("", "/sources", ""),
        (None, "/libraries", ":/libraries"),
        (None, None, ""),
    ],
)
def test_installation_imports_wheels_before_the_callers_libraries_and_no_sources(
    monkeypatch, tmp_path, callers, own, expected
):
    for name, value in (("RLK_CALLERS_PYTHONPATH", callers), ("PYTHONPATH", own)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    seen = {}

    def child(command, cwd, env, stdout):
        seen.update(env)
        return SimpleNamespace(returncode=0, stdout="{}")

    monkeypatch.setattr(subprocess, "run", child)
    install_gpu.run(tmp_path / "prebuilt" / "site", "prebuilt", "cuda")
    assert seen["PYTHONPATH"] == f"{tmp_path}/prebuilt/site{expected}"


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Runs the comparison on what installations are told to give."""

    def run(**differing):
        folder = tmp_path / "wheels"
        folder.mkdir(exist_ok=True)
        (folder / WHEEL).write_bytes(b"wheel")
        monkeypatch.setattr(install_gpu, "install", lambda wheels, site, prebuilt: site)
        made = to_builtins(origin())
        monkeypatch.setattr(
            install_gpu,
            "run",
            lambda site, way, device: {"origin": made, "results": differing.get(way, DIGESTS)},
        )
        (tmp_path / "out").mkdir(exist_ok=True)
        return install_gpu.main(folder, tmp_path / "out" / "install.json", "cuda")

    return run


def test_install_record_names_wheels_and_one_digest_of_each_operator(installed, tmp_path):
    assert installed() == 0
    (record,) = load_folder(tmp_path / "out").values()
    assert record.wheels == {WHEEL: install_gpu.sha256(b"wheel")}
    assert [(r.operator, r.way, r.backend, r.results) for r in record.rows] == [
        (operator, way, backend, results)
        for way, backend in (("prebuilt", "cuda"), ("compiled", "cuda"), ("triton", "triton"))
        for operator, results in (("demo", 2), ("other", 1))
    ]
    assert len({row.digest for row in record.rows}) == 2


@pytest.mark.parametrize(
    "results",
    [
        {**DIGESTS, "demo/float32/eager/y": "other"},
        {k: v for k, v in DIGESTS.items() if not k.startswith("other")},
        {**DIGESTS, "more/float32/eager/y": "d"},
    ],
    ids=["other bytes", "one missing", "one alone"],
)
def test_install_way_with_other_results_is_red(installed, tmp_path, capsys, results):
    assert installed(triton=results) == 1
    assert "triton must equal prebuilt" in capsys.readouterr().out
    rows = json.loads((tmp_path / "out" / "install.json").read_text())["rows"]
    given = {
        way: {row["operator"]: row["digest"] for row in rows if row["way"] == way}
        for way in install_gpu.WAYS
    }
    assert given["prebuilt"] == given["compiled"] != given["triton"]


def test_install_without_kernels_in_wheels_is_refused(tmp_path, capsys):
    (tmp_path / "rlk_demo-1-py3-none-any.whl").touch()
    assert install_gpu.main(tmp_path, tmp_path / "install.json", "cuda") == 2
    assert "must hold wheels with kernels" in capsys.readouterr().out
