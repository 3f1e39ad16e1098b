"""Make a small model, warm it up on demonstrations, improve it with CISPO, and show what that did.

python examples/quickstart/run.py [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from task import write_task

HERE = Path(os.path.relpath(Path(__file__).parent))
RUNS = Path("runs/quickstart")


def strop(*arguments: str, quiet: bool = False) -> str:
    """Run a command of strop as a user would; returns what it printed when `quiet`."""
    command = [sys.executable, "-m", "strop.cli", *arguments]
    if not quiet:
        print(f"\n$ strop {' '.join(arguments)}", flush=True)
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE if quiet else None, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of the model, the task and the runs (default 0)")
    seed = parser.parse_args().seed
    start = time.perf_counter()
    write_task(RUNS, seed)
    both = ("--seed", str(seed), "--run.overwrite", "true")
    strop("sft", str(HERE / "sft.toml"), *both)
    strop("train", str(HERE / "cispo.toml"), *both)
    show(time.perf_counter() - start, seed)


def show(seconds: float, seed: int) -> None:
    """The table at the end: held-out accuracy before and after, speed, and where the model lies."""
    from rich.console import Console
    from rich.table import Table

    rows = map(json.loads, (RUNS / "cispo/metrics.jsonl").read_text().splitlines())
    steps = [row for row in rows if row["step"] > 0]  # 0: the evaluation before the first
    before, after = (scores(RUNS / name / "model", seed) for name in ("sft", "cispo"))
    table = Table("held-out accuracy", "before", "after", title="strop quickstart", title_justify="left")
    for name in ("greedy", "sampled"):
        table.add_row(name, f"{before[name]['reward']:.3f}", f"{after[name]['reward']:.3f}")
    console = Console(highlight=False)
    console.print(table)
    rate = sum(s["tokens_per_second"] for s in steps) / len(steps)
    console.print(f"{len(steps)} steps, {rate:,.0f} response tokens per second, {seconds:.0f} s in all")
    console.print(f"model: {RUNS / 'cispo/model'}    curves and samples: {RUNS / 'cispo/report.html'}", soft_wrap=True)
    for line in (RUNS / f"cispo/rollouts/eval_{len(steps):06d}.jsonl").read_text().splitlines()[:5]:
        row = json.loads(line)
        console.print(
            f"  {row['prompt']} {row['response']:<6} {'right' if row['reward'] else 'wrong, ' + row['label']}"
        )


def scores(model: Path, seed: int) -> dict[str, dict[str, float]]:
    """What `strop eval` says of a model on the held-out tasks."""
    flags = ("--model.path", str(model), "--seed", str(seed), "--json")
    return json.loads(strop("eval", str(HERE / "cispo.toml"), *flags, quiet=True))


if __name__ == "__main__":
    main()
