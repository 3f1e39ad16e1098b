"""How time and memory of a step grow: with the number of sequences, with their length, and with the steps of a run.

    .venv/bin/python benchmarks/growth.py [--threads 1]

Time per token should stay level; the memory of a run should not grow with its steps.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from contest import machine, report, run_in_turn
from grpo_step import quickstart_model
from rich.console import Console
from rich.table import Table
from sampling import longer

SEQUENCES = (8, 32, 64, 128, 256)
LENGTHS = (64, 256, 1024, 4096)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="of each process (default 1)")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each (default 3)")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contestant:
        one(given.contestant, given.folder)
        return
    names = [f"sample {n} x 32" for n in SEQUENCES] + [f"sample 8 x {n}" for n in LENGTHS]
    names += (
        [f"train {n} x 32" for n in SEQUENCES] + [f"train 8 x {n}" for n in LENGTHS] + ["run 20 steps", "run 100 steps"]
    )
    with tempfile.TemporaryDirectory() as folder:
        longer(quickstart_model(Path(folder)), 8192)
        words = [__file__, "--folder", folder, "--contestant"]
        found = run_in_turn({name: [*words, name] for name in names}, given.repeats, given.threads)
    table = Table("", "us a token", "peak MB", title="growth")
    for name, m in found.items():
        table.add_row(name, f"{1e6 * m['seconds'] / m['tokens']:.0f}", f"{m['peak_mb']:.0f}")
    console = Console()
    console.print(table)
    console.print(f"{given.threads} threads; {machine('torch', 'transformers')}")


def one(name: str, folder: str) -> None:
    what, count, _, length = name.split() if not name.startswith("run") else ("run", name.split()[1], "", "")
    if what == "run":
        run_steps(folder, int(count))
        return
    seconds = {"sample": sample, "train": train}[what](f"{folder}/task/start", int(count), int(length))
    report(seconds=seconds, tokens=int(count) * int(length))


def sample(model: str, count: int, length: int) -> float:
    from strop.config.training import ModelOptions
    from strop.engines import TorchEngine
    from strop.runtime.models import load_model
    from strop.types import GenerateRequest, Sampling

    engine = TorchEngine(load_model(ModelOptions(path=model)).model, stop_token_ids=[], max_sequences=256)
    request = GenerateRequest((2, 3), tuple(range(count)), Sampling(max_response_tokens=length))
    asyncio.run(engine.generate(GenerateRequest((2, 3), (0,), Sampling(max_response_tokens=4))))
    start = time.perf_counter()
    asyncio.run(engine.generate(request))
    return time.perf_counter() - start


def train(model: str, count: int, length: int) -> float:
    from dataclasses import replace

    import torch

    from strop import ops
    from strop.algorithms import LikelihoodObjective
    from strop.config.training import ModelOptions, TorchTrainerOptions
    from strop.data import build_batch
    from strop.runtime.models import load_model
    from strop.trainers import TorchTrainer
    from strop.types import Prompt, Rollout

    trainer = TorchTrainer(load_model(ModelOptions(path=model)).model, TorchTrainerOptions(), total_steps=9)
    mask, numbers, versions = (False, *[True] * (length - 1)), (0.0,) * length, (0,) * length
    rollouts = [
        Rollout(
            Prompt(i, (2,), ""),
            i,
            0,
            tuple(torch.randint(2, 9, (length,)).tolist()),
            mask,
            numbers,
            versions,
            "stop",
            "",
        )
        for i in range(count)
    ]
    batch = build_batch(rollouts, [1.0] * count)
    weights = ops.token_weights(batch.loss_mask, batch.sequence_ids, reduction="token_mean")
    batch = replace(batch, token_weights=weights)
    trainer.step(batch.select([0]), LikelihoodObjective())
    start = time.perf_counter()
    trainer.step(batch, LikelihoodObjective())
    return time.perf_counter() - start


def run_steps(folder: str, steps: int) -> None:
    import strop
    from strop.config import TrainConfig, make_config

    values = {
        "model": {"path": f"{folder}/task/start"},
        "data": {"kind": "jsonl", "path": f"{folder}/task/train.jsonl"},
        "rollout": {"prompts_per_step": 8, "group_size": 8, "max_response_tokens": 8},
        "reward": {"kind": "exact"},
        "run": {"num_steps": steps, "folder": f"{folder}/run", "overwrite": True, "save_rollouts": False},
    }
    start = time.perf_counter()
    result = strop.train(make_config(TrainConfig, values, {}, file="growth.toml"))
    tokens = sum(step["response_tokens"] * 64 for step in result.steps)
    report(seconds=time.perf_counter() - start, tokens=tokens)


if __name__ == "__main__":
    main()
