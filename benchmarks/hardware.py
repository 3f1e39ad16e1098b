"""How far the parts of a step are from what the machine can do: its best rate of products, and of memory.

    .venv/bin/python benchmarks/hardware.py [--threads 2] [--repeats 3]

Models of random weights in the shape of the quickstart's and of SmolLM2-135M. Only operations of products with weights are
counted, and only bytes that must be read or written, so that attention, norms and the like show as distance.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from contest import machine
from decoders import SMALL, SMOL, sampled
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from strop import ops
from strop.engines import TorchEngine
from strop.layers import use_lean_layers
from strop.products import linear, use_better_library
from strop.types import GenerateRequest, Sampling

ROWS, LENGTH, STEPS = 16, 128, 16  # of a training pass; tokens that are sampled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="default 2")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each, of which the best counts (default 3)")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    limits = {"GFLOP/s": best_rate(), "GB/s": best_bandwidth()}
    table = Table("model", "part", "achieved", "of the machine's best", title="distance from the hardware")
    for name, shape in (("quickstart", SMALL), ("SmolLM2-135M", SMOL)):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=1024, tie_word_embeddings=True))
        use_better_library(model)
        use_lean_layers(model)
        for part, unit, amount, seconds in parts(model, given.repeats):
            table.add_row(name, part, f"{amount / seconds / 1e9:.1f} {unit}", f"{amount / seconds / limits[unit]:.0%}")
    console = Console()
    console.print(table)
    console.print(
        f"best: {', '.join(f'{limit / 1e9:.1f} {unit}' for unit, limit in limits.items())}; {given.threads} threads; "
        f"{machine('torch', 'transformers')}"
    )


def best(work: Callable[[], object], repeats: int) -> float:
    """Seconds, after a turn that does not count."""
    turns = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        turns.append(time.perf_counter() - start)
    return min(turns[1:])


def best_rate() -> float:
    """Operations a second of a large product."""
    x, weight = torch.randn(2048, 576), torch.randn(1536, 576)
    return 2 * len(x) * weight.numel() / best(lambda: linear(x, weight), 30)


def best_bandwidth() -> float:
    """Bytes a second, read or read and written, of tensors that no cache holds."""
    x, y = torch.ones(2, 1 << 27)
    return 4 * x.numel() * max(1 / best(x.sum, 5), 2 / best(lambda: x.add_(1), 5), 3 / best(lambda: x.add_(y), 5))


def parts(model: Any, repeats: int) -> list[tuple[str, str, float, float]]:
    """Name, the unit of its rate, operations or bytes, and seconds."""
    head = model.lm_head.weight.detach().clone().requires_grad_()
    body = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    everything, positions = body + head.numel(), ROWS * LENGTH
    hidden = torch.randn(positions, head.shape[1], requires_grad=True)
    targets = torch.randint(len(head), (positions,))
    ids = torch.randint(len(head), (ROWS, LENGTH))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def learn() -> None:
        model.base_model(input_ids=ids, use_cache=False).last_hidden_state.square().mean().backward()

    def score() -> None:
        ops.linear_logprobs(hidden, head, targets, with_entropy=True).logprobs.mean().backward()

    whole_step = 28.0 * everything  # bytes: four numbers a weight are read, three written
    return [
        ("sample, 1 at a time", "GB/s", 4.0 * everything, seconds_a_token(model, 1, repeats)),
        ("sample, 64 at a time", "GFLOP/s", 128.0 * everything, seconds_a_token(model, 64, repeats)),
        ("learn, body", "GFLOP/s", 6.0 * body * positions, best(learn, repeats)),
        ("learn, head", "GFLOP/s", 8.0 * head.numel() * positions, best(score, repeats)),  # logits are computed twice
        ("AdamW", "GB/s", whole_step, best(optimizer.step, repeats)),
    ]


def seconds_a_token(model: Any, count: int, repeats: int) -> float:
    """Of so many sequences together, beside reading their prompts."""
    engine = TorchEngine(model, stop_token_ids=[], max_sequences=count)

    def sample(length: int) -> None:
        requests = [GenerateRequest((3, 4, 5), (seed,), Sampling(max_response_tokens=length)) for seed in range(count)]
        sampled(engine, requests)

    sample(STEPS + 1)  # the longest: later ones find a cache that is wide enough
    return (best(lambda: sample(STEPS + 1), repeats) - best(lambda: sample(1), repeats)) / STEPS


if __name__ == "__main__":
    main()
