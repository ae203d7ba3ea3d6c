# SPDX-License-Identifier: Apache-2.0
"""What a binary must be before anything in it is called."""

import json
import os
import shutil
import subprocess

import pytest

from rlk.cuda import build, library, sources, toolchain
from rlk.errors import BackendError

STRICT = list(toolchain.compile_flags("sm_90"))
# What launch.cuh exports, with an ABI number of one's own.
EXPORTS = """
extern "C" int rlk_abi_version() { return ABI; }
extern "C" const char* rlk_error_string(int) { return "out of cheese"; }
"""


@pytest.fixture
def entry(tmp_path):
    """Makes an entry of these exports, compiled without nvcc."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")

    def make(exports=EXPORTS, abi=toolchain.ABI, flags=STRICT):
        path = tmp_path / "demo.so"
        command = ["g++", "-shared", "-fPIC", f"-DABI={abi}", "-x", "c++", "-", "-o", str(path)]
        subprocess.run(command, input=exports, text=True, check=True)
        manifest = {"digest": "d" * 64, "flags": flags, "log": ""}
        (tmp_path / sources.MANIFEST).write_text(json.dumps(manifest))
        return path

    return make


def refusal(path):
    with pytest.raises(BackendError) as raised:
        library.Library(path, "demo")
    return str(raised.value)


def test_library_compiled_here_opens_without_a_gpu(built):
    opened = library.Library(built, "demo")
    assert opened.function("rlk_abi_version", [])() == toolchain.ABI
    assert opened.digest == build.read_manifest(built.parent)["digest"]


def test_library_compiled_here_keeps_its_other_symbols_hidden(built):
    opened = library.Library(built, "demo")
    for name in ("cudaLaunchKernel", "cudaSetDevice", "probe_results"):
        with pytest.raises(BackendError, match=f"must export {name}, got none"):
            opened.function(name, [])


@pytest.mark.parametrize("flag", ["-use_fast_math", "--use_fast_math", "-ftz=true"])
def test_library_compiled_with_fast_math_is_refused(entry, flag):
    sentence = refusal(entry(flags=[*STRICT, flag]))
    assert f"demo.so must be compiled with IEEE arithmetic, got {flag}; delete" in sentence


def test_library_of_another_abi_is_refused(entry):
    sentence = refusal(entry(abi=toolchain.ABI + 1))
    assert f"must have ABI {toolchain.ABI}, got {toolchain.ABI + 1}" in sentence


def test_library_without_abi_number_is_refused(entry):
    assert "must export rlk_abi_version, got none" in refusal(entry('extern "C" int other;'))


def test_library_that_is_no_binary_is_refused(entry):
    path = entry()
    path.write_text("not a binary")
    assert "must be a shared library, got" in refusal(path)


def test_status_other_than_success_raises_the_runtime_text(entry):
    opened = library.Library(entry(), "demo")
    opened.check(0, "demo_forward")
    with pytest.raises(BackendError) as raised:
        opened.check(42, "demo_forward")
    assert str(raised.value) == (
        'demo: backend "cuda" must run demo_forward, got CUDA error 42: out of cheese'
    )


def test_library_in_a_forked_process_is_refused(entry):
    path = entry()
    library.Library(path, "demo")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            library.Library(path, "demo")
            os.write(writer, b"opened")
        except BackendError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as answer:
        assert answer.read() == (
            "demo: the process must not be forked after CUDA was used, got a forked one; "
            "start it by spawn"
        )
