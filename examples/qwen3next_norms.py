# SPDX-License-Identifier: Apache-2.0
"""Replay every norm of a Qwen3-Next model in other company, patched and not, and compare bits.

    python examples/qwen3next_norms.py [--device cuda] [--checkpoint DIR] [--json FILE]

Needs transformers. One training step on the bytes of this repository's README records what each
norm reads and the gradient it gets. Each norm then sees these rows alone, in chunks, permuted and
with zero rows behind them. Last, a prompt is run alone and in a padded batch, to show how far its
log-probabilities drift, and which modules drift when all they read is the same.

Exit status 1 if a patched norm differs anywhere.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from replay import ARRANGEMENTS, Counts, Recorded, Replay, Results, differing_bits, refuse_without
from torch import nn

try:
    import transformers
    from qwen3next_drift import Prompt, drift, text
    from transformers import AutoConfig, Qwen3NextConfig, Qwen3NextForCausalLM

    import rlk
    import rlk_qwen3next
    from rlk import registry
    from rlk_qwen3next import PatchSite, patch, unpatch
except ModuleNotFoundError as error:
    refuse_without(error, "qwen3next_norms", "rlk-qwen3next[transformers]")

DWEIGHT = "dweight"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda, or auto with a checkpoint")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--checkpoint", type=Path, help="folder of a Qwen3-Next with safetensors")
    parser.add_argument("--layers", type=int, help="only the first layers of the checkpoint")
    parser.add_argument("--tokens", type=int, help="of each sequence of the training step")
    parser.add_argument("--rows", type=int, default=32, help="that each norm sees alone")
    parser.add_argument("--backend", action="append", help="all that serve the device if none")
    parser.add_argument("--json", type=Path, help="write all counts there")
    options = parser.parse_args(arguments)
    on_gpu = options.device != "cpu"
    options.dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    options.tokens = options.tokens or (512 if on_gpu else 48)
    # Rows of the largest batch in which rows of a site are sought that differ.
    options.most_rows = 1 << (18 if on_gpu else 12)
    options.backend = options.backend or (["cuda", "triton"] if on_gpu else ["golden"])
    return options


def load_model(options: argparse.Namespace) -> nn.Module:
    """The checkpoint, or a model of four layers with the norm widths of the real one on a GPU."""
    dtype = getattr(torch, options.dtype)
    if options.checkpoint:
        config = AutoConfig.from_pretrained(options.checkpoint)
        if options.layers:
            config.num_hidden_layers = options.layers
            config.layer_types = config.layer_types[: options.layers]
        spread = {"device_map": "auto"} if options.device == "auto" else {}
        model = Qwen3NextForCausalLM.from_pretrained(
            options.checkpoint, config=config, dtype=dtype, **spread
        )
        return model if spread else model.to(options.device)
    torch.manual_seed(2026)
    config = Qwen3NextConfig(
        vocab_size=256, hidden_size=256 if options.device == "cpu" else 2048,
        intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=256, linear_num_key_heads=2, linear_num_value_heads=4, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) / 8)
    return model.to(options.device, dtype)


def record(model: nn.Module, paths: list[str], tokens: int) -> dict[str, Recorded]:
    """One training step; what each norm read and got."""
    records = {path: Recorded() for path in paths}

    def hook(path: str) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
            width = module.weight.shape[0]
            entry = records[path]
            entry.inputs = [x.detach().reshape(-1, width).clone() for x in inputs]
            y.register_hook(lambda dy: setattr(entry, "dy", dy.reshape(-1, width).clone()))

        return keep

    # Gradients of the other parameters would need as much memory as the model.
    norms = {model.get_submodule(path).weight for path in paths}
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in norms)
    handles = [model.get_submodule(path).register_forward_hook(hook(path)) for path in paths]
    ids = torch.cat([text(0, tokens), text(tokens, tokens)]).to(model.device)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad()
    for handle in handles:
        handle.remove()
    return records


def run(module: nn.Module, inputs: list[torch.Tensor], dy: torch.Tensor) -> Results:
    """Outputs and gradients of one call."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = module(*leaves)
    gradients = torch.autograd.grad(y, [*leaves, module.weight], dy)
    names = ("dx", "dgate")[: len(leaves)]
    return {"y": y.detach(), **dict(zip((*names, DWEIGHT), gradients, strict=True))}


def other_size(module: nn.Module, recorded: Recorded, most: int) -> dict[str, int] | None:
    """The smallest batch, of a power of two of these rows again and again, in which rows differ.

    From those in the whole batch, in any result; None if they do in no batch of up to `most` rows.
    """
    site, total = replay(module, lambda chunks, parts: {}), recorded.dy.shape[0]
    whole = site.rows_of(site.run(*recorded.rows(slice(None))))
    for size in (1 << power for power in range(most.bit_length())):
        rows = torch.arange(size, device=recorded.dy.device) % total
        found = site.rows_of(site.run(*recorded.rows(rows)))
        other = [differing_bits(t, whole[name][rows]).any(-1) for name, t in found.items()]
        if differing := int(torch.stack(other).any(0).sum()):
            return {"batch": size, "rows": differing}
    return None


def replay(module: nn.Module, chunked: Callable[..., Results]) -> Replay:
    """One norm as a site to be replayed."""
    return Replay(lambda inputs, dy: run(module, inputs, dy), (DWEIGHT,), chunked=chunked)


def exact_dweight(
    site: PatchSite, module: nn.Module, recorded: Recorded, chunks: list[torch.Tensor], backend: str
) -> torch.Tensor:
    """dweight of rows that arrive in chunks: exact states are added, and rounded once."""
    declared = registry.declared_in(rlk_qwen3next.__name__)
    operator = next(operator for operator in declared if operator.name == site.operator)
    ops = (getattr(torch.ops.rlk, operator.name + end).default for end in ("", "_backward"))
    forward, backward = ops
    known = {"eps": site.eps, "activation": site.activation, "weight_offset": site.weight_offset}
    scalars = [known.get(s.name, s.default) for s in operator.scalars]
    needs = [t.gradient == "parameter" for t in operator.differentiable]
    weight = module.weight.detach()
    total = rlk.exact_sum.new(weight.shape[0], weight.device)
    for chunk in chunks:
        inputs, dy = recorded.rows(chunk)
        _, rstd = forward(*inputs, weight, *scalars, backend)
        *_, state = backward(dy, *inputs, weight, rstd, *scalars, *needs, backend)
        total = rlk.exact_sum.merge(total, state)
    return rlk.exact_sum.round(total, weight.dtype)


def replay_sites(
    model: nn.Module, sites: list[PatchSite], records: dict[str, Recorded], options: Any
) -> list[dict[str, Any]]:
    """The counts of every site: unpatched, and patched on each backend. The model ends patched."""
    results: list[dict[str, Any]] = []
    for site in sites:
        rows, width = records[site.path].dy.shape
        row = {"site": site.path, "class": site.class_name, "rows": rows, "width": width}
        module = model.get_submodule(site.path)

        def accumulated(chunks: Any, parts: list[Results]) -> Results:
            return {DWEIGHT: sum(part[DWEIGHT] for part in parts)}

        recorded = records[site.path]
        found = replay(module, accumulated).differing(recorded, options.rows)
        row = {**row, "unpatched": found, "patched": {}}
        if not any(totals(found)[:-1]):
            row["other_size"] = other_size(module, recorded, options.most_rows)
        results.append(row)
    patch(model)
    for site, row in zip(sites, results, strict=True):
        module, recorded = model.get_submodule(site.path), records[site.path]
        for backend in options.backend:

            def exact(chunks: Any, parts: list[Results], backend: str = backend) -> Results:
                total = exact_dweight(site, module, recorded, chunks, backend)  # noqa: B023
                return {DWEIGHT: total}

            with rlk.use_backend(backend):
                with rlk.trace() as launches:
                    run(module, *recorded.rows(slice(None)))
                if {launch.backend for launch in launches} != {backend}:
                    raise RuntimeError(f"{site.path} must run on {backend}, got {launches}")
                found = replay(module, exact).differing(recorded, options.rows)
                row["patched"][backend] = found
    return results


def totals(counts: Counts) -> list[int]:
    """Differing rows in each arrangement, and differing columns of dweight in all."""
    rows = [counts[name]["rows"] for name in ARRANGEMENTS]
    return [*rows, sum(counts[name].get(DWEIGHT, 0) for name in ARRANGEMENTS)]


def print_sites(results: list[dict[str, Any]], backends: list[str]) -> None:
    """A line for each site."""
    columns = (*ARRANGEMENTS, DWEIGHT)
    variants = ["unpatched", *(f"patched, {backend}" for backend in backends)]
    width = max(len(row["site"]) for row in results)
    blocks = "".join(f"  {variant:^45}" for variant in variants)
    print(f"rows with other bits than in the whole batch; of {DWEIGHT}, columns\n")
    print(f"{'':{width}}  {'':>12}{blocks}".rstrip())
    heads = ("  " + "".join(f"{c:>9}" for c in columns)) * len(variants)
    print(f"{'site':{width}}  {'rows x N':>12}{heads}")
    for row in results:
        size = f"{row['rows']} x {row['width']}"
        counts = [totals(row["unpatched"]), *(totals(row["patched"][b]) for b in backends)]
        numbers = "".join("  " + "".join(f"{n:>9}" for n in block) for block in counts)
        print(f"{row['site']:{width}}  {size:>12}{numbers}")


def print_summary(results: list[dict[str, Any]], options: argparse.Namespace) -> int:
    """What the table says in words; returns the differing rows and columns of patched norms."""
    unpatched = [totals(row["unpatched"]) for row in results]
    in_rows = sum(any(total[:-1]) for total in unpatched)
    in_dweight = sum(total[-1] > 0 for total in unpatched)
    patched = sum(sum(totals(row["patched"][b])) for row in results for b in options.backend)
    count = len(results)
    print(f"\nunpatched: rows differ at {in_rows} of {count} sites, {DWEIGHT} at {in_dweight}")
    print(f"patched: {patched} rows or columns differ at {count} sites")
    for row in results:
        if "other_size" in row and (size := row["other_size"]):
            print(f"  {row['site']}: in a batch of {size['batch']} rows {size['rows']} differ")
    alike = sum("other_size" in row and not row["other_size"] for row in results)
    if alike:
        print(f"  At {alike} sites rows differ in no batch of 1 to {options.most_rows} rows.")
    if not in_rows and not any(row.get("other_size") for row in results):
        print(f"  On {options.device} the unpatched norms add along a row in one order.")
        print(f"  {DWEIGHT}, a sum over rows, is where company shows here.")
    if not in_rows and not in_dweight:
        print(f"  But not in {options.dtype}: try --dtype float32.")
    return patched


def print_drift(name: str, found: dict[str, Any]) -> None:
    """A paragraph on one model."""
    print(
        f"\n{name}: log-probabilities of {found['tokens']} tokens, alone and in a padded batch: "
        f"{found['tokens_differing']} differ, by at most {found['largest']:.3g}"
    )
    print(f"  first module that drifts by itself: {found['first']}")
    for class_name, (count, compared) in sorted(found["modules"].items()):
        print(f"  {class_name}: {count} of {compared} drift though all they read is the same")


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    options = parse(arguments)
    transformers.logging.set_verbosity_error()
    model = load_model(options)
    report = patch(model)
    print(report)
    unpatch(model)
    sites = list(report.changed)
    records = record(model, [site.path for site in sites], options.tokens)
    model.eval()
    prompt = Prompt(model, options.tokens // 2 + 5)
    before = drift(model, prompt)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"\n{type(model).__name__} in {options.dtype} on {options.device}, {versions}")
    results = replay_sites(model, sites, records, options)
    print_sites(results, options.backend)
    wrong = print_summary(results, options)
    drifts = {"unpatched": before}
    print_drift("unpatched", before)
    for backend in options.backend:
        with rlk.use_backend(backend):
            found = drifts[f"patched, {backend}"] = drift(model, prompt)
        print_drift(f"patched, {backend}", found)
        classes = {site.class_name for site in sites}
        wrong += sum(found["modules"].get(name, [0])[0] for name in classes)
    if options.json:
        document = {
            "transformers": transformers.__version__, "torch": torch.__version__,
            "device": options.device, "dtype": options.dtype, "sites": results, "drift": drifts,
        }  # fmt: skip
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print("\npatched norms: " + ("every bit the same" if wrong == 0 else f"{wrong} differences"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
