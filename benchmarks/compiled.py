"""A step's forward and backward passes as they are, and with the model's body through torch.compile.

    .venv/bin/python benchmarks/compiled.py [--repeats 5] [--threads 1]

The quickstart's shape (.4M weights) and a Llama of 10M weights, built here with random ones; 2 groups of 8 responses, rows
padded, 90 tokens together. Shapes of rows change from step to step, so it compiles for any shape (dynamic=True). Figures are
process CPU time, medians of turns that both take one after the other, and the seconds that compiling took.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

import torch
from contest import machine
from layouts import batch_of, passes
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from strop.trainers.forward import TokenScorer
from strop.trainers.layout_choice import Cutter

SHAPES = {
    "quickstart": {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4},
    "10M": {"hidden_size": 320, "intermediate_size": 960, "num_hidden_layers": 7, "num_attention_heads": 5},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="turns of each (default 5)")
    parser.add_argument("--threads", type=int, default=1, help="default 1")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    table = Table("model", "weights", "plain: CPU s", "compiled: CPU s", "compiled / plain", "compiling s")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        for name, shape in SHAPES.items():
            table.add_row(name, *measure(shape, given.repeats))
    console = Console()
    console.print(table)
    console.print(f"{given.threads} threads; {machine('torch', 'transformers')}")


def measure(shape: dict[str, int], repeats: int) -> list[str]:
    torch.manual_seed(0)
    config = LlamaConfig(**shape, vocab_size=32, max_position_embeddings=256)
    model = LlamaForCausalLM(config).eval()
    scorer = TokenScorer(model)
    cutter = Cutter(scorer.model, ["padded"], 4096)
    batch = batch_of((1, 1), argparse.Namespace(size=90, groups=2))
    plain = model.model.forward
    compiled: Any = torch.compile(plain, dynamic=True)
    passes(model, scorer, cutter, batch)
    start = time.perf_counter()
    gradients = [passes_with(model, forward, scorer, cutter, batch)[1] for forward in (plain, compiled)]
    compiling = time.perf_counter() - start
    off = float((gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max())
    assert off < 1e-3, off
    turns: list[list[float]] = [[], []]
    for _ in range(repeats):
        for forward, found in zip((plain, compiled), turns, strict=True):
            found.append(passes_with(model, forward, scorer, cutter, batch)[0])
    one, other = map(statistics.median, turns)
    weights = f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M"
    return [weights, f"{one:.3f}", f"{other:.3f}", f"{other / one:.2f}", f"{compiling:.0f}"]


def passes_with(model: Any, forward: Any, *rest: Any) -> tuple[float, torch.Tensor]:
    model.model.forward = forward
    return passes(model, *rest)


if __name__ == "__main__":
    main()
