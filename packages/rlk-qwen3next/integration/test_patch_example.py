# SPDX-License-Identifier: Apache-2.0
"""The example that replays every norm: it runs, it finds differences, and it fails on one."""

import json
from pathlib import Path

import pytest
import torch

import rlk
import rlk_qwen3next
from rlk.test_support.examples import load_example
from rlk.test_support.fresh_process import folders_of, status_and_output

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "qwen3next_norms.py"
SITES = 14


def run(*arguments):
    """(exit status, what a process of its own prints)"""
    return status_and_output(EXAMPLE, *arguments, folders=folders_of(rlk, rlk_qwen3next))


def summed(counts, name):
    return sum(arrangement.get(name, 0) for arrangement in counts.values())


def assert_patched_sites_agree(document, backends, sites=SITES):
    assert len(document["sites"]) == sites
    for site in document["sites"]:
        assert set(site["patched"]) == set(backends)
        names = {"y", "dx", "rows"} | ({"dgate"} if "Gated" in site["class"] else set())
        for counts in site["patched"].values():
            assert counts["alone"].keys() == names
            for arrangement in ("chunked", "permuted", "padded"):
                assert counts[arrangement].keys() == {*names, "dweight"}
            found = [n for arrangement in counts.values() for n in arrangement.values()]
            assert set(found) == {0}, site["site"]


@pytest.fixture
def example(monkeypatch):
    """The example as a module, on few tokens."""
    return load_example(EXAMPLE, monkeypatch)


FEW = ["--tokens", "12", "--rows", "3"]


def test_example_on_the_cpu_finds_company_in_every_unpatched_norm_and_none_patched(tmp_path):
    status, output = run("--json", tmp_path / "found.json", "--tokens", 40, "--rows", 8)
    assert status == 0, output
    document = json.loads((tmp_path / "found.json").read_text())
    assert_patched_sites_agree(document, ["golden"])
    for site in document["sites"]:
        assert summed(site["unpatched"], "dweight") > 0, site["site"]
    assert output.rstrip().endswith("patched norms: every bit the same")
    for found in document["drift"].values():
        assert found["tokens"] == 24
        norms = [name for name in found["modules"] if "Norm" in name]
        assert norms == []


def test_example_loads_a_checkpoint_in_shards_and_only_its_first_layers(build, tmp_path):
    build().save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found = tmp_path / "found.json"
    for options, sites in (([], SITES), (["--layers", 2], 2 * 3 + 1)):
        status, output = run("--checkpoint", tmp_path, "--json", found, *FEW, *options)
        assert status == 0, output
        document = json.loads(found.read_text())
        assert_patched_sites_agree(document, ["golden"], sites)
        assert {site["width"] for site in document["sites"]} == {64, 16} | (
            set() if options else {32}
        )


def test_example_wrong_weight_gradient_of_a_patched_norm_fails_it(example, monkeypatch, capsys):
    def once_per_chunk(site, module, recorded, chunks, backend):
        parts = [example.run(module, *recorded.rows(chunk))["dweight"] for chunk in chunks]
        return sum(parts)

    monkeypatch.setattr(example, "exact_dweight", once_per_chunk)
    assert example.main(FEW) == 1
    assert capsys.readouterr().out.rstrip().endswith("differences")


def test_example_patched_norm_that_reads_its_company_fails_it(example, monkeypatch):
    load_model = example.load_model

    def planted(options):
        model = load_model(options)
        norm = model.model.layers[1].input_layernorm
        norm.register_forward_hook(lambda m, x, y: y * (1 + x[0].shape[0] / 64))
        return model

    monkeypatch.setattr(example, "load_model", planted)
    assert example.main(FEW) == 1


def test_example_without_any_patch_is_not_believed(example, monkeypatch):
    def in_name_only(model):
        report = rlk_qwen3next.patch(model)
        rlk_qwen3next.unpatch(model)
        return report

    monkeypatch.setattr(example, "patch", in_name_only)
    with pytest.raises(RuntimeError, match=r"must run on golden, got \[\]"):
        example.main(FEW)


class OtherFrom64(torch.nn.Module):
    """Rows of 64 and more have one bit more in their first column."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x):
        y = x * self.weight
        return y + torch.eye(8)[0] * (len(x) >= 64)


def test_example_names_the_first_size_at_which_unpatched_rows_differ(example):
    rows = torch.randn(24, 8, generator=torch.Generator().manual_seed(3))
    recorded = example.Recorded([rows], rows)
    assert example.other_size(OtherFrom64(), recorded, 128) == {"batch": 64, "rows": 64}
    assert example.other_size(OtherFrom64(), recorded, 32) is None


@pytest.mark.parametrize(
    ("path", "class_name"),
    [("model.embed_tokens", "Embedding"), ("model.layers.0.input_layernorm", "Qwen3NextRMSNorm")],
)
def test_drift_of_a_planted_module_is_found_there_first(example, build, path, class_name):
    model = build().eval()
    rlk_qwen3next.patch(model)
    prompt = example.Prompt(model, 11)
    model.get_submodule(path).register_forward_hook(lambda m, x, y: y * (1 + y.shape[0] / 64))
    found = example.drift(model, prompt)
    assert found["first"] == f"{path} ({class_name})"
    assert found["modules"][class_name][0] == 1
    assert found["tokens_differing"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_example_on_a_gpu_finds_company_in_unpatched_norms_and_none_patched(tmp_path, dtype):
    found = tmp_path / "found.json"
    status, output = run("--device", "cuda", "--dtype", dtype, "--json", found)
    assert status == 0, output
    document = json.loads(found.read_text())
    assert_patched_sites_agree(document, ["cuda", "triton"])
    unpatched = [site["unpatched"] for site in document["sites"]]
    assert sum(summed(counts, "rows") + summed(counts, "dweight") for counts in unpatched) > 0
    for site in document["sites"]:
        assert ("other_size" in site) == (summed(site["unpatched"], "rows") == 0)
