"""What sampling ahead of training saves: seconds of a step with 0 steps ahead, in lockstep, and streaming.

    .venv/bin/python benchmarks/ahead.py [--steps 10] [--repeats 3] [--threads 1]

The quickstart's model, 16 prompts x 8 samples of up to 32 tokens, temperature 1, one update a batch. Two places where time may
be won: the embedded engine beside the trainer, with scores at once; and an async scorer that waits, as one that asks a server
does: .3 s for most prompts, 1.5 s for one in sixteen. Numbers are those of the fastest of several runs, since other processes
only slow one down: seconds from the second step's end to the last one's, per step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from contest import machine
from grpo_step import quickstart_model
from rich.console import Console
from rich.table import Table

import strop
from strop.observe.console import QuietConsole

SOURCE = """
import asyncio

def at_once(rollout):
    return len(set(rollout.text)) / 8

async def slow(rollout):
    await asyncio.sleep(1.5 if rollout.prompt.row % 16 == 0 else 0.3)
    return len(set(rollout.text)) / 8
"""
CASES = (("scores at once", "at_once"), ("a slow scorer", "slow"))
WAYS: dict[str, dict[str, Any]] = {
    "0 ahead": {},
    "1 ahead": {"rollout.max_off_policy_steps": 1},
    "1 ahead, streaming": {"rollout.max_off_policy_steps": 1, "rollout.streaming": True},
    "2 ahead, streaming": {"rollout.max_off_policy_steps": 2, "rollout.streaming": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="of each run (default 10)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, in turn (default 3)")
    parser.add_argument("--threads", type=int, default=1, help="default 1")
    given = parser.parse_args()
    table = Table("", *(f"{way}: s a step" for way in WAYS), "staleness")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = quickstart_model(folder)
        (folder / "reward.py").write_text(SOURCE)
        for case, function in CASES:
            found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
            for _ in range(given.repeats):
                for way, options in WAYS.items():
                    config = config_of(folder, model, f"{folder}/reward.py:{function}", given)
                    found[way].append(measure(strop.load_config(config, options)))
            seconds = {way: min(second for second, _ in runs) for way, runs in found.items()}
            base = seconds["0 ahead"]
            ages = ", ".join(f"{statistics.median(age for _, age in runs):.1f}" for runs in found.values())
            table.add_row(case, *(f"{second:.3f} ({second / base:.2f})" for second in seconds.values()), ages)
    console = Console()
    console.print(table)
    console.print(f"{given.threads} threads; {machine('torch', 'transformers')}")


class Clock(QuietConsole):
    """Notes when each step ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def step(self, step: int, num_steps: int, metrics: Any) -> None:
        self.ends.append(time.perf_counter())
        super().step(step, num_steps, metrics)


def measure(config: Any) -> tuple[float, float]:
    """Seconds of a step, and the mean staleness of the last steps."""
    clock = Clock()
    rows = strop.train(config, console=clock).steps
    seconds = (clock.ends[-1] - clock.ends[1]) / (len(clock.ends) - 2)
    return seconds, statistics.fmean(row.get("staleness", 0.0) for row in rows[3:])


def config_of(folder: Path, model: str, function: str, given: Any) -> Path:
    config = folder / "run.toml"
    config.write_text(
        f"""
[model]
path = "{model}"
[data]
kind = "jsonl"
path = "{folder}/task/train.jsonl"
[rollout]
prompts_per_step = 16
group_size = 8
max_response_tokens = 32
[reward]
kind = "function"
function = "{function}"
max_concurrent = {128 if function.endswith("slow") else 64}
[trainer]
num_threads = {given.threads}
lr = 1e-6
[run]
num_steps = {given.steps}
overwrite = true
folder = "{folder}/run"
"""
    )
    return config


if __name__ == "__main__":
    main()
