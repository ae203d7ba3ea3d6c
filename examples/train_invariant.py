# SPDX-License-Identifier: Apache-2.0
"""Train one model with its batch cut in four ways, and compare the gradients bit by bit.

    python examples/train_invariant.py [--model qwen3next] [--steps 3] [--tokens 12] [--json FILE]
    python examples/train_invariant.py --model qwenimage

Needs transformers for a small Qwen3-Next, diffusers for one with a block of Qwen-Image; runs on
CPUs, in eight processes. A step is eight samples, on 1 rank with 8 micro-batches, 2 x 4, 4 x 2 and
8 x 1. Norms, and biases of modulations, accumulate exactly or as PyTorch does; only they are
trained, or everything is. What reaches a norm must itself have equal bits in every layout: a
micro-batch is one sample throughout, every process has one thread, and deterministic algorithms
are on. The factor in the loss is 1 / T with T the tokens of all ranks, and ranks add: nothing is
averaged.

Exit status 1 if an exact gradient differs between layouts where it must not: at the first step,
and, where only they are trained, at any.
"""

import argparse
import contextlib
import inspect
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from replay import refuse_without
from torch import nn

try:
    from rlk.compare import raw_bits
    from rlk.exact_grad import ExactGradAccumulator
except ModuleNotFoundError as error:
    refuse_without(error, "train_invariant", "rlk-qwen3next[transformers]")

SAMPLES = 8
# Ranks, each with as many micro-batches as it has samples.
RANKS = (1, 2, 4, 8)
README = Path(__file__).resolve().parents[1] / "README.md"

# The gradients of a step that can be exact, after the sum over ranks.
Step = dict[str, torch.Tensor]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=TASKS, default="qwen3next")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=12, help="of each sample")
    parser.add_argument("--json", type=Path, help="write all counts there")
    return parser.parse_args(arguments)


class Qwen3Next:
    """Next tokens of a text."""

    needs = "rlk-qwen3next[transformers]"

    @staticmethod
    def build() -> nn.Module:
        """Four layers, one of them attention, with experts; the same weights in every process."""
        import transformers

        from rlk_qwen3next import patch

        transformers.logging.set_verbosity_error()  # it tells each process what it falls back to
        torch.manual_seed(2026)
        config = transformers.Qwen3NextConfig(
            vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=4,
            num_attention_heads=2, num_key_value_heads=1, head_dim=32, linear_num_key_heads=2,
            linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        )  # fmt: skip
        model = transformers.Qwen3NextForCausalLM(config)
        patch(model)
        return model

    @staticmethod
    def samples(tokens: int, step: int) -> list[torch.Tensor]:
        """Bytes of the README as token ids [1, tokens + 1], others in every step."""
        content = README.read_bytes()
        start = step * SAMPLES * tokens
        ids = [content[i % len(content)] for i in range(start, start + SAMPLES * (tokens + 1))]
        return list(torch.tensor(ids).view(SAMPLES, tokens + 1).split(1))

    @staticmethod
    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """Of the next tokens, summed."""
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
        )


class QwenImage:
    """The velocity from noise to an image, both random."""

    needs = "rlk-qwenimage[diffusers]"

    @staticmethod
    def build() -> nn.Module:
        """One block, what embeds its inputs, and the output norm."""
        import diffusers

        from rlk_qwenimage import patch

        torch.manual_seed(2026)
        model = diffusers.QwenImageTransformer2DModel(
            num_layers=1, attention_head_dim=16, num_attention_heads=3, in_channels=8,
            out_channels=2, joint_attention_dim=24, axes_dims_rope=(4, 6, 6),
        )  # fmt: skip
        patch(model)
        return model

    @staticmethod
    def samples(tokens: int, step: int) -> list[torch.Tensor]:
        """Noise, image and text, [3, tokens, 24] each, others in every step."""
        generator = torch.Generator().manual_seed(step)
        return [torch.randn(3, tokens, 24, generator=generator) for _ in range(SAMPLES)]

    @staticmethod
    def loss(model: nn.Module, sample: torch.Tensor) -> torch.Tensor:
        """The squared error of the velocity half way, summed."""
        noise, image = sample[:2, :, :8].split(1)
        tokens = image.shape[1]
        arguments = {"txt_seq_lens": [tokens]} if "txt_seq_lens" in _arguments(model) else {}
        velocity = model(
            hidden_states=0.5 * noise + 0.5 * image,
            encoder_hidden_states=sample[2:],
            encoder_hidden_states_mask=torch.ones(1, tokens, dtype=torch.int64),
            timestep=torch.tensor([0.5]),
            img_shapes=[[(1, 1, tokens)]],
            **arguments,
        ).sample
        return (velocity - (noise - image)).square().sum()


def _arguments(model: nn.Module) -> list[str]:
    return list(inspect.signature(model.forward).parameters)


TASKS: dict[str, Any] = {"qwen3next": Qwen3Next, "qwenimage": QwenImage}


def add_ranks(parameters: list[nn.Parameter], group: Any) -> None:
    """The sum over ranks of rounded gradients, as every trainer makes it."""
    for parameter in parameters:
        dist.all_reduce(parameter.grad, group=group)


def train(options: argparse.Namespace, group: Any, exact: bool, everything: bool) -> list[Step]:
    """The steps of one rank."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    task = TASKS[options.model]
    model = task.build()
    covered = ExactGradAccumulator(model).report().exact
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(everything or name in covered)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimiser = torch.optim.SGD(trained.values(), lr=0.5)
    accumulator = ExactGradAccumulator(model, group)
    ordinary = accumulator.report().ordinary if exact else tuple(trained)
    factor = 1 / (SAMPLES * options.tokens)
    steps = []
    for step in range(options.steps):
        mine = task.samples(options.tokens, step)
        mine = mine[rank * len(mine) // ranks : (rank + 1) * len(mine) // ranks]
        for parameter in trained.values():
            # An expert that no token chose has no gradient, but is added like the others.
            parameter.grad = torch.zeros_like(parameter)
        with accumulator if exact else contextlib.nullcontext():
            for sample in mine:
                (task.loss(model, sample) * factor).backward()
        add_ranks([p for n, p in trained.items() if n in ordinary], group)
        steps.append({n: trained[n].grad.clone() for n in covered})
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
    """For each step, how many elements have other bits."""
    return [
        sum(int((raw_bits(step[n]) != raw_bits(expected[n])).sum()) for n in expected)
        for step, expected in zip(steps, reference, strict=True)
    ]


def compare(folder: str) -> dict[str, dict[str, list[int]]]:
    """By what is trained and how gradients accumulate: differences from 1 rank, by layout."""
    found: dict[str, dict[str, list[int]]] = {}
    for everything in (False, True):
        for exact in (True, False):
            runs = {r: torch.load(Path(folder) / f"{r}-{exact}-{everything}") for r in RANKS}
            title = f"{'all' if everything else 'covered'} trained, "
            title += "exact" if exact else "PyTorch"
            found[title] = {
                f"{ranks} x {SAMPLES // ranks}": differing(runs[ranks], runs[1])
                for ranks in RANKS[1:]
            }
    found["elements"] = {"all": [sum(g.numel() for g in step.values()) for step in runs[1]]}
    return found


def show(found: dict[str, dict[str, list[int]]]) -> None:
    """A table: one line for each run, one column for each step."""
    (total, *_) = found["elements"]["all"]
    print(f"Elements of covered gradients, of {total}, that differ from 1 rank x 8 micro-batches")
    steps = len(found["elements"]["all"])
    print(f"{'':26}{'ranks':8}" + "".join(f"{f'step {s + 1}':>9}" for s in range(steps)))
    for title, layouts in found.items():
        for layout, counts in layouts.items() if title != "elements" else ():
            print(f"{title:26}{layout:8}" + "".join(f"{count:>9}" for count in counts))


def main(arguments: list[str] | None = None) -> int:
    """Train, compare, print."""
    options = parse(arguments)
    try:
        TASKS[options.model].build()  # what it imports, the processes share
    except ModuleNotFoundError as error:
        refuse_without(error, "train_invariant", TASKS[options.model].needs)
    with tempfile.TemporaryDirectory() as folder:
        run(options, folder)
        found = compare(folder)
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    never = [c for counts in found["covered trained, exact"].values() for c in counts]
    at_first = [counts[0] for counts in found["all trained, exact"].values()]
    same = not any(never) and not any(at_first)
    print("exact gradients: " + ("every bit the same" if same else "differences"))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
