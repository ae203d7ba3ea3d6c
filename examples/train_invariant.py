# SPDX-License-Identifier: Apache-2.0
"""Train one model with its batch cut in four ways, and compare the gradients bit by bit.

    python examples/train_invariant.py [--steps 3] [--tokens 12] [--json FILE]

Needs transformers; runs on CPUs, in eight processes. A step is eight sequences, on 1 rank with 8
micro-batches, 2 x 4, 4 x 2 and 8 x 1. Norms accumulate exactly or as PyTorch does; only they are
trained, or everything is. What reaches a norm must itself have equal bits in every layout: a
micro-batch is one sequence throughout, every process has one thread, and deterministic algorithms
are on. The factor in the loss is 1 / T with T the tokens of all ranks, and ranks add: nothing is
averaged.

Exit status 1 if an exact gradient differs between layouts where it must not: at the first step,
and, where only norms are trained, at any.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from rlk.compare import raw_bits
from rlk.exact_grad import ExactGradAccumulator
from rlk_qwen3next import patch

SEQUENCES = 8
# Ranks, each with as many micro-batches as it has sequences.
RANKS = (1, 2, 4, 8)
README = Path(__file__).resolve().parents[1] / "README.md"

# The norm gradients of a step, after the sum over ranks.
Step = dict[str, torch.Tensor]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=12, help="of each sequence")
    parser.add_argument("--json", type=Path, help="write all counts there")
    return parser.parse_args(arguments)


def build_model() -> nn.Module:
    """Four layers, one of them attention, with experts; the same weights in every process."""
    torch.manual_seed(2026)
    config = Qwen3NextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config)
    patch(model)
    return model


def sequences(tokens: int, step: int) -> torch.Tensor:
    """Bytes of the README as token ids [8, tokens + 1], others in every step."""
    content = README.read_bytes()
    start = step * SEQUENCES * tokens
    ids = [content[i % len(content)] for i in range(start, start + SEQUENCES * (tokens + 1))]
    return torch.tensor(ids).view(SEQUENCES, tokens + 1)


def backward(model: nn.Module, ids: torch.Tensor, factor: float) -> None:
    """One micro-batch: the loss of its next tokens, summed and scaled."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    (loss * factor).backward()


def add_ranks(parameters: list[nn.Parameter], group: Any) -> None:
    """The sum over ranks of rounded gradients, as every trainer makes it."""
    for parameter in parameters:
        dist.all_reduce(parameter.grad, group=group)


def train(options: argparse.Namespace, group: Any, exact: bool, everything: bool) -> list[Step]:
    """The steps of one rank."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    model = build_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(everything or "norm" in name)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimiser = torch.optim.SGD(trained.values(), lr=0.5)
    accumulator = ExactGradAccumulator(model, group)
    ordinary = accumulator.report().ordinary if exact else tuple(trained)
    steps = []
    for step in range(options.steps):
        mine = sequences(options.tokens, step).chunk(ranks)[rank]
        for parameter in trained.values():
            # An expert that no token chose has no gradient, but is added like the others.
            parameter.grad = torch.zeros_like(parameter)
        if exact:
            with accumulator:
                for one in mine.split(1):
                    backward(model, one, 1 / (SEQUENCES * options.tokens))
        else:
            for one in mine.split(1):
                backward(model, one, 1 / (SEQUENCES * options.tokens))
        add_ranks([p for n, p in trained.items() if n in ordinary], group)
        steps.append({n: p.grad.clone() for n, p in trained.items() if "norm" in n})
        optimiser.step()
    return steps


def work(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Every run in which this process takes part; the first rank of each keeps its gradients."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = (Path(folder) / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=max(RANKS))
    for ranks in RANKS:
        group = dist.new_group(range(ranks))
        if rank >= ranks:
            continue
        for exact in (True, False):
            for everything in (False, True):
                steps = train(options, group, exact, everything)
                if rank == 0:
                    torch.save(steps, Path(folder) / f"{ranks}-{exact}-{everything}")
    dist.barrier()
    dist.destroy_process_group()


def run(options: argparse.Namespace, folder: str) -> None:
    """All processes, which share what this one has imported."""
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=work, args=(rank, options, folder)) for rank in range(max(RANKS))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError("train_invariant: every rank must end well, got one that failed")


def differing(steps: list[Step], reference: list[Step]) -> list[int]:
    """For each step, how many elements of norm gradients have other bits."""
    return [
        sum(int((raw_bits(step[n]) != raw_bits(expected[n])).sum()) for n in expected)
        for step, expected in zip(steps, reference, strict=True)
    ]


def compare(folder: str) -> dict[str, dict[str, list[int]]]:
    """By what is trained and how norms accumulate: differences from 1 rank, by layout."""
    found: dict[str, dict[str, list[int]]] = {}
    for everything in (False, True):
        for exact in (True, False):
            runs = {r: torch.load(Path(folder) / f"{r}-{exact}-{everything}") for r in RANKS}
            title = f"{'all' if everything else 'norms'} trained, "
            title += "exact" if exact else "PyTorch"
            found[title] = {
                f"{ranks} x {SEQUENCES // ranks}": differing(runs[ranks], runs[1])
                for ranks in RANKS[1:]
            }
    found["elements"] = {"all": [sum(g.numel() for g in step.values()) for step in runs[1]]}
    return found


def show(found: dict[str, dict[str, list[int]]]) -> None:
    """A table: one line for each run, one column for each step."""
    (total, *_) = found["elements"]["all"]
    print(f"Elements of norm gradients, of {total}, that differ from 1 rank x 8 micro-batches")
    steps = len(found["elements"]["all"])
    print(f"{'':24}{'ranks':8}" + "".join(f"{f'step {s + 1}':>9}" for s in range(steps)))
    for title, layouts in found.items():
        for layout, counts in layouts.items() if title != "elements" else ():
            print(f"{title:24}{layout:8}" + "".join(f"{count:>9}" for count in counts))


def main(arguments: list[str] | None = None) -> int:
    """Train, compare, print."""
    options = parse(arguments)
    transformers.logging.set_verbosity_error()  # it tells each process what it falls back to
    with tempfile.TemporaryDirectory() as folder:
        run(options, folder)
        found = compare(folder)
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    never = [c for counts in found["norms trained, exact"].values() for c in counts]
    at_first = [counts[0] for counts in found["all trained, exact"].values()]
    same = not any(never) and not any(at_first)
    print("exact gradients: " + ("every bit the same" if same else "differences"))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
