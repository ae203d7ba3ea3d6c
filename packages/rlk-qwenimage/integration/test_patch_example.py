# SPDX-License-Identifier: Apache-2.0
"""The example that replays every site: it runs, it finds differences, and it fails on one."""

import json
from pathlib import Path

import pytest
import torch

import rlk
import rlk_qwenimage
from rlk.test_support.examples import load_example
from rlk.test_support.fresh_process import folders_of, status_and_output

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "qwenimage_adaln.py"
# A block: two modulations, four norms, four rotations, four RMS norms. The text's norm and the
# output's add two; the last block's second norm of the text goes nowhere and gets no gradient.
BLOCK, ENDS = 2 + 4 + 4 + 4, 2 - 1
NAMES = {
    "modulation": {"y", "dtemb", "dweight", "dbias"},
    "modulated norm": {"y", "dx", "dmod"},
    "rotation": {"y", "dx"},
    "output norm": {"y", "dx", "dtemb", "dweight", "dbias"},
    "RMS norm": {"y", "dx", "dweight"},
}
PARAMETERS = {"dweight", "dbias"}


def run(*arguments):
    """(exit status, what a process of its own prints)"""
    packages = ("qwenimage", "qwen3next", "rope")
    sources = [ROOT / f"packages/rlk-{name}/src" for name in packages]
    return status_and_output(EXAMPLE, *arguments, folders=[*folders_of(rlk), *sources])


def assert_patched_sites_agree(document, backends):
    for site in document["sites"]:
        assert set(site["patched"]) == set(backends)
        names = NAMES[site["kind"]]
        ordered = {"dweight"} if site["kind"] in ("modulation", "output norm") else set()
        for counts in site["patched"].values():
            assert counts["alone"].keys() == names - PARAMETERS | {"rows"}
            assert counts["chunked"].keys() == names - PARAMETERS | {"rows"}
            assert counts["permuted"].keys() == names - ordered | {"rows"}
            assert counts["padded"].keys() == names | {"rows"}
            found = [n for arrangement in counts.values() for n in arrangement.values()]
            assert set(found) == {0}, site["site"]


def different(document):
    """The sites whose unpatched results depend on company."""
    return [
        site
        for site in document["sites"]
        if any(n for counts in site["unpatched"].values() for n in counts.values())
    ]


@pytest.fixture
def example(monkeypatch):
    """The example as a module, on one small image."""
    return load_example(EXAMPLE, monkeypatch)


@pytest.fixture
def few(build, tmp_path):
    """A checkpoint with one small image, which is quick."""
    build(num_layers=1).save_pretrained(tmp_path / "model", max_shard_size="100KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    return ["--checkpoint", str(tmp_path / "model"), "--image", "1024x1024", "--shrink", "16"]


def test_example_on_the_cpu_finds_company_in_unpatched_sites_and_in_none_patched(tmp_path):
    found = tmp_path / "found.json"
    status, output = run("--json", found, "--shrink", 16)
    assert status == 0, output
    document = json.loads(found.read_text())
    assert len(document["sites"]) == 3 * (2 * BLOCK + ENDS + BLOCK + ENDS)
    assert_patched_sites_agree(document, ["golden"])
    images = {tuple(site["shape"][1:2]) for site in document["sites"] if site["site"] == "norm_out"}
    assert images == {(4 * 4,), (5 * 5,), (6 * 3,)}
    assert {site["kind"] for site in different(document)} >= {"modulation", "output norm"}
    assert output.rstrip().endswith("patched sites: every bit the same")


def test_example_loads_a_checkpoint_in_shards(few, tmp_path):
    found = tmp_path / "found.json"
    status, output = run(*few, "--json", found)
    assert status == 0, output
    document = json.loads(found.read_text())
    assert len(document["sites"]) == BLOCK + ENDS
    assert_patched_sites_agree(document, ["golden"])
    assert {site["model"] for site in document["sites"]} == {few[1]}


@pytest.mark.parametrize("path", ["transformer_blocks.0.img_mod", "norm_out"])
def test_example_patched_site_that_reads_its_company_fails_it(example, few, monkeypatch, path):
    load = example.models

    def planted(options):
        found = load(options)
        for model in found.values():
            model.get_submodule(path).register_forward_hook(
                lambda m, x, y: y * (1 + x[0].shape[0] / 64)
            )
        return found

    monkeypatch.setattr(example, "models", planted)
    assert example.main(few) == 1


def test_example_without_any_patch_is_not_believed(example, few, monkeypatch):
    def in_name_only(model):
        rlk_qwenimage.patch(model)
        return rlk_qwenimage.unpatch(model)

    monkeypatch.setattr(example, "patch", in_name_only)
    with pytest.raises(RuntimeError, match=r"must run on golden, got \[\]"):
        example.main(few)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
class TestExampleOnAGpu:
    @staticmethod
    def found(tmp_path, dtype, *options):
        file = tmp_path / "found.json"
        status, output = run("--device", "cuda", "--dtype", dtype, "--json", file, *options)
        assert status == 0, output
        document = json.loads(file.read_text())
        assert_patched_sites_agree(document, ["cuda", "triton"])
        return document

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_patched_sites_agree_on_images_of_full_size(self, tmp_path, dtype):
        document = self.found(tmp_path, dtype)
        assert {site["shape"][1] for site in document["sites"] if site["site"] == "norm_out"} == {
            4096, 6889, 6032,
        }  # fmt: skip
        # cuBLAS computes three BF16 samples as it computes one.
        assert different(document) or dtype == "bfloat16"

    def test_unpatched_sites_differ_in_a_large_bfloat16_batch(self, tmp_path):
        many = ("--samples", "257", "--image", "1024x1024", "--shrink", "16")
        document = self.found(tmp_path, "bfloat16", *many)
        assert "modulation" in {site["kind"] for site in different(document)}
