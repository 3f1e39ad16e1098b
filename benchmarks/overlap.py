"""What a step waits for a slow scorer, with groups scored while others are sampled and with scoring after sampling.

    .venv/bin/python benchmarks/overlap.py [--steps 6] [--repeats 3] [--threads 1]

The quickstart's model, 16 prompts x 8 samples x 32 tokens through 32 slots, temperature 1. The scorer's function sleeps for so
many milliseconds a response, as one that asks a server does, in 4 workers or (async) as up to 64 calls at once. Numbers are
medians over the steps but the first; both ways make the same rewards, which is checked.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from contest import machine
from grpo_step import quickstart_model
from rich.console import Console
from rich.table import Table

import strop
from strop.rewards.scorer import Scorer

SOURCE = """
import asyncio, time

def plain(rollout):
    time.sleep({seconds})
    return len(set(rollout.text)) / 8

async def concurrent(rollout):
    await asyncio.sleep({seconds})
    return len(set(rollout.text)) / 8
"""
# name of the function, milliseconds of a call
CASES = (("plain", 2), ("plain", 10), ("plain", 40), ("concurrent", 20), ("concurrent", 200))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="of each run (default 6)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, in turn (default 3)")
    parser.add_argument("--threads", type=int, default=1, help="default 1")
    given = parser.parse_args()
    table = Table(
        "function", "ms a call", "after: sample + score s", "ahead: sample + score s", "ahead / after", "idle s"
    )
    with tempfile.TemporaryDirectory() as folder:
        model = quickstart_model(Path(folder))
        for name, milliseconds in CASES:
            table.add_row(name, str(milliseconds), *measure(Path(folder), model, name, milliseconds, given))
    console = Console()
    console.print(table)
    console.print(f"{given.threads} threads; {machine('torch', 'transformers')}")


def measure(folder: Path, model: str, name: str, milliseconds: int, given: Any) -> tuple[str, ...]:
    reward = folder / "reward.py"
    reward.write_text(SOURCE.format(seconds=milliseconds / 1000))
    rows: dict[str, list[dict[str, float]]] = {"ahead": [], "after": []}
    rewards: dict[str, list[float]] = {}
    for _ in range(given.repeats):
        for way, found in rows.items():
            with scoring(way):
                steps = strop.train(config_of(folder, model, f"{reward}:{name}", given)).steps
            found += steps[1:]
            rewards[way] = [row["reward"] for row in steps]
    assert rewards["ahead"] == rewards["after"], rewards
    seconds = {way: median(found, "seconds/sample", "seconds/score") for way, found in rows.items()}
    ratio = seconds["ahead"] / seconds["after"]
    idle = median(rows["ahead"], "seconds/idle")
    return f"{seconds['after']:.2f}", f"{seconds['ahead']:.2f}", f"{ratio:.2f}", f"{idle:.2f}"


def median(rows: list[dict[str, float]], *names: str) -> float:
    return statistics.median(sum(row[name] for name in names) for row in rows)


@contextmanager
def scoring(way: str) -> Iterator[None]:
    """Ahead, as strop does; or after sampling."""
    own = Scorer.ahead
    if way == "after":
        Scorer.ahead = contextmanager(lambda scorer, advance: iter([None]))  # type: ignore[method-assign]
    try:
        yield
    finally:
        Scorer.ahead = own  # type: ignore[method-assign]


def config_of(folder: Path, model: str, function: str, given: Any) -> Any:
    (folder / "run.toml").write_text(
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
[engine]
max_sequences = 32
[reward]
kind = "function"
function = "{function}"
[trainer]
num_threads = {given.threads}
lr = 1e-6
[run]
num_steps = {given.steps}
overwrite = true
folder = "{folder}/run"
"""
    )
    return strop.load_config(folder / "run.toml")


if __name__ == "__main__":
    main()
