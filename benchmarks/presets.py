"""Every preset on the quickstart task: what each reaches in the same number of steps from the same model.

    make quickstart                      # once: makes the task and the warmed-up model
    .venv/bin/python benchmarks/presets.py [--steps 10] [--presets cispo grpo ...]

Prints a table of the sampled held-out accuracy before and after, and the time of a step as a ratio to the first preset's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

import strop
from strop.config import PRESETS

CONFIG = Path("examples/quickstart/cispo.toml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="batches of rollouts (default 10)")
    parser.add_argument("--presets", nargs="*", default=list(PRESETS), choices=list(PRESETS), help="default: all")
    arguments = parser.parse_args()
    if not Path("runs/quickstart/sft/model").is_dir():
        sys.exit("runs/quickstart/sft/model is missing: run make quickstart first.")
    table = Table("preset", "before", "after", "step time", title=f"{arguments.steps} steps on the quickstart task")
    first = None
    for preset in arguments.presets:
        before, after, seconds = run(preset, arguments.steps)
        first = first or seconds
        table.add_row(preset, f"{before:.3f}", f"{after:.3f}", f"{seconds / first:.2f}")
    Console().print(table)


def run(preset: str, steps: int) -> tuple[float, float, float]:
    """Held-out accuracy before and after, and seconds of a step (median)."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = {"algorithm.preset": preset, "run.num_steps": steps, "run.folder": f"{folder}/run"}
        result = strop.train(strop.load_config(CONFIG, overrides))
    scores = [evaluation.scores["sampled"].reward for evaluation in result.evaluations]
    phases = ("seconds/sample", "seconds/score", "seconds/logprobs", "seconds/train")
    made = (step for step in result.steps if step["step"] > 0)  # 0: the evaluation before the first
    seconds = sorted(sum(step[name] for name in phases) for step in made)
    return scores[0], scores[-1], seconds[len(seconds) // 2]


if __name__ == "__main__":
    main()
