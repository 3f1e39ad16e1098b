"""A step's forward and backward passes in each layout of rows: padded, packed, shared, and the one that auto takes.

    .venv/bin/python benchmarks/layouts.py [--model FOLDER] [--groups 4] [--size 256] [--repeats 5] [--threads 2]

Without --model, the quickstart's (.4M weights). Groups of 8 responses to one prompt; ratios of prompt to response tokens 4:1,
1:1 and 1:8, prompt and longest response together --size tokens, response lengths between half of the longest and all of it.
Figures are process CPU time, medians of turns that the layouts take one after the other, as ratios to padded rows.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from contest import machine
from grpo_step import quickstart_model
from rich.console import Console
from rich.table import Table

from strop.data import Batch, build_batch
from strop.trainers.forward import TokenScorer
from strop.trainers.layout_choice import Cutter, readable
from strop.trainers.ranks import Ranks
from strop.types import Prompt, Rollout

SAMPLES, LAYOUTS, RATIOS = 8, ("padded", "packed", "shared", "auto"), ((4, 1), (1, 1), (1, 8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face folder; default: the quickstart's model, made here")
    parser.add_argument("--groups", type=int, default=4, help="prompts of a step (default 4)")
    parser.add_argument("--size", type=int, default=90, help="tokens of a prompt and its longest response (default 90)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each (default 5)")
    parser.add_argument("--threads", type=int, default=2, help="default 2")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = load(given.model or quickstart_model(Path(folder)))
    table = Table(
        "prompt : response", *LAYOUTS, "auto takes", "padding", title="CPU time of a step's passes, padded = 1"
    )
    for ratio in RATIOS:
        table.add_row(f"{ratio[0]} : {ratio[1]}", *measure(model, batch_of(ratio, given), given.repeats))
    console = Console()
    console.print(table)
    console.print(f"{given.groups} groups of {SAMPLES}, {given.threads} threads; {machine('torch', 'transformers')}")


def load(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def batch_of(ratio: tuple[int, int], given: argparse.Namespace) -> Batch:
    longest = given.size * ratio[1] // sum(ratio)
    rng, rollouts = random.Random(0), []
    for row in range(given.groups):
        prompt = tuple(rng.randrange(2, 10) for _ in range(given.size - longest))
        for sample in range(SAMPLES):
            count = rng.randint(max(1, longest // 2), longest)
            tokens = prompt + tuple(rng.randrange(2, 10) for _ in range(count))
            mask = tuple(place >= len(prompt) for place in range(len(tokens)))
            numbers = (0.0,) * len(tokens), (0,) * len(tokens)
            rollouts.append(Rollout(Prompt(row, prompt, ""), row, sample, tokens, mask, *numbers, "stop", text=""))
    return build_batch(rollouts, [1.0] * len(rollouts))


def measure(model: Any, batch: Batch, repeats: int) -> list[str]:
    """Cells of a row of the table; the gradients of all layouts are compared first (float32, sums in another order)."""
    scorer = TokenScorer(model)
    cutters = {name: Cutter(scorer.model, readable(scorer, name, Ranks()), 4096) for name in LAYOUTS}
    gradients = {name: passes(model, scorer, cutter, batch)[1] for name, cutter in cutters.items()}
    for name, gradient in gradients.items():
        off = float((gradient - gradients["padded"]).abs().max() / gradients["padded"].abs().max())
        assert off < 1e-3, f"{name}: gradients differ by {off:.2g}"
    turns: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    for _ in range(repeats):
        for name, cutter in cutters.items():
            turns[name].append(passes(model, scorer, cutter, batch)[0])
    medians = {name: statistics.median(found) for name, found in turns.items()}
    cut = cutters["auto"](batch)
    share = f"{100 * cut.padding / cut.positions:.1f} %"
    return [*(f"{medians[name] / medians['padded']:.2f}" for name in LAYOUTS), cut.kind, share]


def passes(model: Any, scorer: TokenScorer, cutter: Cutter, batch: Batch) -> tuple[float, torch.Tensor]:
    """Seconds of CPU time, and the gradient of the first layer's first matrix. Cutting counts."""
    model.zero_grad()
    start = time.process_time()
    cut = cutter(batch)
    for sequences, rows in cut.parts:
        part = batch.select(sequences)
        logprobs, _ = scorer(part, temperature=1.0, layout=cut.kind, with_entropy=False, rows=rows)
        logprobs.sum().backward()
    seconds = time.process_time() - start
    first = next(p for name, p in model.named_parameters() if p.dim() == 2 and "layers.0" in name)
    return seconds, first.grad.clone()


if __name__ == "__main__":
    main()
