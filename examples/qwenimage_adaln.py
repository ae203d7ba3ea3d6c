# SPDX-License-Identifier: Apache-2.0
"""Replay every norm, modulation and rotation of Qwen-Image in other company, and compare bits.

    python examples/qwenimage_adaln.py [--device cuda] [--checkpoint DIR] [--json FILE]

Needs diffusers. A training step on random latents of three image sizes records what each site of a
small transformer, and of one block of full width, reads and the gradient it gets. Each site then
sees these samples alone (of many, some 16), in chunks, permuted and with zero samples behind them,
patched and not. On a CPU, images are an eighth as high and wide and the block has two heads, unless
asked otherwise. On a GPU three BF16 samples may be computed as one is, unpatched too; many are not.

Exit status 1 if a patched site differs anywhere.
"""

import argparse
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch
from replay import Counts, refuse_without
from torch import nn

try:
    import diffusers
    from diffusers import QwenImageTransformer2DModel
    from qwenimage_sites import Site, find, reached, recording

    import rlk
    from rlk_qwenimage import patch, unpatch
except ModuleNotFoundError as error:
    refuse_without(error, "qwenimage_adaln", "rlk-qwenimage[diffusers]")

# Height and width in tokens of 16 x 16 pixels.
IMAGES = {"1024x1024": (64, 64), "1328x1328": (83, 83), "1664x928": (104, 58)}
TEXT = 77
# Samples of a large batch that are seen alone.
ALONE = 16
OUTPUT, PARAMETERS = "y", ("dweight", "dbias")
COLUMNS = ("outputs", "gradients", "parameters")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--checkpoint", type=Path, help="folder of a transformer with safetensors")
    parser.add_argument("--samples", type=int, default=3, help="in the batch")
    parser.add_argument("--shrink", type=int, help="divides the height and width of the images")
    parser.add_argument("--heads", type=int, help="of the block of full width; the real one has 24")
    parser.add_argument("--image", action="append", choices=IMAGES, help="all if none is given")
    parser.add_argument("--backend", action="append", help="all that serve the device if none")
    parser.add_argument("--json", type=Path, help="write all counts there")
    options = parser.parse_args(arguments)
    on_gpu = options.device != "cpu"
    options.dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    options.shrink = options.shrink or (1 if on_gpu else 8)
    options.heads = options.heads or (24 if on_gpu else 2)
    options.image = options.image or list(IMAGES)
    options.backend = options.backend or (["cuda", "triton"] if on_gpu else ["golden"])
    return options


def models(options: argparse.Namespace) -> dict[str, nn.Module]:
    """A small model and one block of full width; or the checkpoint."""
    dtype = getattr(torch, options.dtype)
    if options.checkpoint:
        loaded = QwenImageTransformer2DModel.from_pretrained(options.checkpoint, torch_dtype=dtype)
        return {str(options.checkpoint): loaded.to(options.device)}
    torch.manual_seed(2026)
    small = QwenImageTransformer2DModel(
        num_layers=2, num_attention_heads=3, attention_head_dim=16, axes_dims_rope=(4, 6, 6),
        in_channels=16, out_channels=4, joint_attention_dim=48,
    )  # fmt: skip
    wide = QwenImageTransformer2DModel(num_layers=1, num_attention_heads=options.heads)
    found = {"small": small, f"one block of {options.heads} heads": wide}
    return {name: model.to(options.device, dtype) for name, model in found.items()}


def step(model: nn.Module, image: str, options: argparse.Namespace) -> list[Site]:
    """One training step on random latents, as a denoiser takes it; its sites with their records."""
    height, width = (max(1, side // options.shrink) for side in IMAGES[image])
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        made = torch.randn(options.samples, *shape, generator=generator)
        return made.to(options.device, model.dtype)

    text = max(1, TEXT // options.shrink)
    arguments = {
        "hidden_states": normal(height * width, model.config.in_channels),
        "encoder_hidden_states": normal(text, model.config.joint_attention_dim),
        "encoder_hidden_states_mask": None,
        "timestep": torch.linspace(0.05, 0.95, options.samples, device=options.device),
        "img_shapes": [[(1, height, width)]] * options.samples,
    }
    if "txt_seq_lens" in inspect.signature(model.forward).parameters:
        arguments["txt_seq_lens"] = [text] * options.samples
    sites = find(model)
    # Gradients of the other parameters would need as much memory as the model.
    wanted = {id(p) for site in sites.values() for p in site.parameters.values()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in wanted)
    with recording(model, sites):
        sample = model(**arguments).sample
        target = normal(*sample.shape[1:])
        ((sample - target).square().sum() / sample[0].numel()).backward()
    model.zero_grad()
    return list(reached(sites).values())


def replay_sites(model: nn.Module, image: str, options: Any) -> list[dict[str, Any]]:
    """The counts of every site: unpatched, and patched on each backend."""
    sites = step(model, image, options)
    alone = min(options.samples, ALONE)
    results: list[dict[str, Any]] = []
    for site in sites:
        found = site.replay().differing(site.recorded, alone)
        shape = list(site.recorded.dy.shape)
        row = {"site": site.path, "kind": site.kind, "image": image, "shape": shape}
        results.append({**row, "unpatched": found, "patched": {}})
    patch(model)
    for site, row in zip(sites, results, strict=True):
        for backend in options.backend:
            with rlk.use_backend(backend):
                with rlk.trace() as launches:
                    site.run(*site.recorded.rows(slice(None)))
                if {launch.backend for launch in launches} != {backend}:
                    raise RuntimeError(f"{site.path} must run on {backend}, got {launches}")
                found = site.replay().differing(site.recorded, alone)
            row["patched"][backend] = found
    unpatch(model)
    return results


def totals(counts: Counts) -> list[int]:
    """What differs in all arrangements together, one number for each column."""
    summed = dict.fromkeys(COLUMNS, 0)
    for found in counts.values():
        for name, count in found.items():
            if name != "rows":
                at = 0 if name == OUTPUT else 2 if name in PARAMETERS else 1
                summed[COLUMNS[at]] += count
    return list(summed.values())


def print_sites(results: list[dict[str, Any]], backends: list[str]) -> None:
    """A line for each site."""
    variants = ["unpatched", *(f"patched, {backend}" for backend in backends)]
    width = max(len(row["site"]) for row in results)
    blocks = "".join(f"  {variant:^33}" for variant in variants)
    print(f"{'':{width}}  {'':>18}{blocks}".rstrip())
    heads = ("  " + "".join(f"{c:>11}" for c in COLUMNS)) * len(variants)
    print(f"{'site':{width}}  {'shape':>18}{heads}")
    for row in results:
        shape = " x ".join(map(str, row["shape"]))
        counts = [totals(row["unpatched"]), *(totals(row["patched"][b]) for b in backends)]
        numbers = "".join("  " + "".join(f"{n:>11}" for n in block) for block in counts)
        print(f"{row['site']:{width}}  {shape:>18}{numbers}")


def print_summary(results: list[dict[str, Any]], backends: list[str]) -> int:
    """Sites with differences in words; returns the differences of patched sites."""
    unpatched = [totals(row["unpatched"]) for row in results]
    for column, name in enumerate(COLUMNS):
        count = sum(total[column] > 0 for total in unpatched)
        print(f"unpatched: {name} differ at {count} of {len(results)} sites")
    patched = sum(sum(totals(row["patched"][b])) for row in results for b in backends)
    print(f"patched: {patched} differences at {len(results)} sites")
    return patched


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    options = parse(arguments)
    diffusers.utils.logging.set_verbosity_error()
    versions = f"torch {torch.__version__}, diffusers {diffusers.__version__}"
    print(f"{options.dtype} on {options.device}, {versions}")
    print("vectors of outputs and gradients, elements of parameters, that differ from the batch's")
    results: list[dict[str, Any]] = []
    for name, model in models(options).items():
        for image in options.image:
            print(f"\n{name}, image {image} / {options.shrink}, {options.samples} samples\n")
            found = replay_sites(model, image, options)
            print_sites(found, options.backend)
            results += [{"model": name, **row} for row in found]
    print()
    wrong = print_summary(results, options.backend)
    if options.json:
        document = {
            "diffusers": diffusers.__version__, "torch": torch.__version__,
            "device": options.device, "dtype": options.dtype, "shrink": options.shrink,
            "sites": results,
        }  # fmt: skip
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print("\npatched sites: " + ("every bit the same" if wrong == 0 else f"{wrong} differences"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
