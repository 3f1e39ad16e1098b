"""Is `strop simulate` right? Times of small runs give a plan; what it says of these and of other runs is compared with them.

    .venv/bin/python benchmarks/simulate.py [--steps 12] [--clock wall] [--output simulate.html]

The quickstart's model before any training (.4M weights, one thread), whose responses end at random. Times are taken from the
first two runs; a third one differs by its seed, the others by their batches and response limit. Seconds are those of
sampling, scoring and training in the synchronous loop, in process CPU time, which other work on the machine moves less;
--clock wall takes a clock's. Exit code 1 if one of the first three is off by more than 10 %; the others are beyond what was
measured, and are only shown.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from contest import machine
from grpo_step import quickstart_model
from rich.console import Console
from rich.table import Table

from strop.config import TrainConfig, make_config
from strop.config.simulation import load_simulation
from strop.observe.console import QuietConsole
from strop.observe.report import curves, write_page
from strop.runtime import train
from strop.simulate import measure, simulate
from strop.simulate.from_run import read_steps

LARGEST_ERROR, NUM_HELD = 0.1, 3  # of the first runs
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of the run, and of the plan
    "measured": ({}, {}),
    "measured, 16 places": ({"engine.max_sequences": 16}, {"max_sequences": 16}),
    "another seed": ({"seed": 1}, {}),
    "twice the prompts": ({"rollout.prompts_per_step": 48}, {"prompts_per_step": 48}),
    "20 tokens at most": ({"rollout.max_response_tokens": 20}, {"max_response_tokens": 20}),
    "4 per prompt": ({"rollout.group_size": 4}, {"group_size": 4}),
}


class CPUConsole(QuietConsole):
    """Times phases in CPU seconds of the process."""

    @contextmanager
    def phase(self, name: str, total: int, *, is_idle: bool = False) -> Iterator[None]:
        start = time.process_time()
        try:
            yield
        finally:
            self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="of each run (default 12)")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu", help="(default cpu)")
    parser.add_argument("--output", type=Path, help="write a page with plots of each step, measured and simulated")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        quickstart_model(folder)
        for place, (options, _) in enumerate(OTHERS.values()):
            print(f"run {place + 1} of {len(OTHERS)}", file=sys.stderr, flush=True)
            train(config_of(folder, place, given.steps, options), console=consoles()[given.clock])
        errors = compare(folder, given)
    sys.exit(max(map(abs, errors[:NUM_HELD])) > LARGEST_ERROR)


def consoles() -> dict[str, QuietConsole]:
    return {"cpu": CPUConsole(), "wall": QuietConsole()}


def config_of(folder: Path, place: int, steps: int, options: dict[str, Any]) -> TrainConfig:
    values: dict[str, Any] = {
        "model": {"path": str(folder / "task/start")},
        "data": {"kind": "jsonl", "path": str(folder / "task/train.jsonl")},
        "rollout": {"prompts_per_step": 24, "group_size": 8, "max_response_tokens": 40},
        "reward": {"kind": "exact"},
        "trainer": {"lr": 1e-6, "num_threads": 1},
        "run": {"num_steps": steps, "folder": str(folder / f"run-{place}")},
    }
    return make_config(TrainConfig, values, options, file="bench.toml")


def compare(folder: Path, given: argparse.Namespace) -> list[float]:
    """Print the table, write the plots, and return the error of each run."""
    measured = measure([folder / "run-0", folder / "run-1"])
    table = Table("run", "measured s", "simulated s", "error", "sampling", "training", title="a step, synchronous")
    errors, sections = list[float](), list[str]()
    for place, (name, (_, options)) in enumerate(OTHERS.items()):
        steps = read_steps(folder / f"run-{place}")
        plan = load_simulation(None, options, measured=measured | {"max_off_policy_steps": 0, "num_steps": len(steps)})
        found = simulate(plan)
        real = [step.total_seconds() for step in steps]
        error = found.seconds / sum(real) - 1
        trains = sum(s.trained_s for s in found.steps) / sum(s.training_seconds() for s in steps) - 1
        samples = (
            sum(s.waited_s for s in found.steps) / sum(s.seconds["sample"] + s.seconds["score"] for s in steps) - 1
        )
        cells = (f"{sum(real) / len(real):.4f}", f"{found.seconds / len(steps):.4f}")
        table.add_row(name, *cells, f"{error:+.1%}", f"{samples:+.1%}", f"{trains:+.1%}")
        ends = [0.0, *(step.ended_s for step in found.steps)]
        rows = [
            {"step": step.step, "measured_s": seconds, "simulated_s": end - begin}
            for step, seconds, begin, end in zip(steps, real, ends[:-1], ends[1:], strict=True)
        ]
        sections.append(curves(name, rows, ("measured_s", "simulated_s")))
        errors.append(error)
    console = Console(highlight=False, width=110)
    console.print(table)
    source = f"{given.steps} steps each, {given.clock} time, one thread; {machine('torch', 'simpy')}"
    console.print(source)
    if given.output is not None:
        write_page(given.output, "strop simulate against runs", source, *sections)
    return errors


if __name__ == "__main__":
    main()
