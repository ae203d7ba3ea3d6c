# SPDX-License-Identifier: Apache-2.0
"""Flags, and the compiler that is found."""

import pytest

from rlk.cuda import toolchain
from rlk.errors import BackendError


def fake_nvcc(folder, release):
    (folder / "bin").mkdir()
    script = folder / "bin" / "nvcc"
    script.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, V{release}'\n")
    script.chmod(0o755)


def test_nvcc_absent_from_cuda_home_is_refused_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(BackendError) as raised:
        toolchain.nvcc("demo")
    assert str(raised.value) == (
        'demo: backend "cuda" needs nvcc 12.8 or newer, got none; '
        "set CUDA_HOME or choose another backend"
    )


@pytest.mark.parametrize(("release", "accepted"), [
    ("11.8.89", False), ("12.7.99", False), ("12.8.0", True), ("12.10.1", True), ("13.0.88", True),
])  # fmt: skip
def test_nvcc_release_below_the_oldest_is_refused(tmp_path, monkeypatch, release, accepted):
    fake_nvcc(tmp_path, release)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    lack = toolchain.nvcc_missing()
    assert (lack is None) == accepted
    assert accepted or f"got {release};" in lack


def test_nvcc_that_prints_no_release_is_refused(tmp_path, monkeypatch):
    fake_nvcc(tmp_path, "?")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(BackendError, match="nvcc must print its release"):
        toolchain.nvcc_missing()


@pytest.mark.parametrize(
    "flag",
    [
        "-use_fast_math", "--use_fast_math", "--use-fast-math", "-ftz=true", "--ftz=true",
        "-prec-div=false", "--prec-sqrt=false", "-fmad=true",
    ],
)  # fmt: skip
def test_flag_that_changes_bits_is_forbidden_in_every_spelling(flag):
    flags = toolchain.compile_flags("sm_90")
    assert toolchain.forbidden_flags(flags) == []
    assert toolchain.forbidden_flags((*flags, flag)) == [flag]


def test_flags_without_a_word_on_contraction_are_forbidden():
    assert toolchain.forbidden_flags(("-O3",)) == ["no -fmad=false"]


@pytest.mark.parametrize("arch", ["90", "compute_90", "sm_90; rm", ""])
def test_architecture_not_named_as_nvcc_does_is_refused(arch):
    with pytest.raises(BackendError, match="the architecture must be like sm_90"):
        toolchain.compile_flags(arch)


def test_hopper_code_is_for_sm_90a_and_ptx_for_newer_gpus_is_not():
    assert toolchain.compile_flags("sm_90")[-1] == "-gencode=arch=compute_90a,code=sm_90a"
    # PTX for sm_90a would run on no other GPU.
    assert [flag for flag in toolchain.prebuilt_flags(("sm_80", "sm_90")) if "arch" in flag] == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90,code=compute_90",
    ]


def test_environment_with_flags_from_outside_drops_them(monkeypatch):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-use_fast_math")
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-ftz=true")
    assert not [name for name in toolchain.environment() if name.startswith("NVCC_")]
