"""Runs the contestants of a benchmark in turn, each in a process of its own, and shows medians as ratios.

Machines are shared and noisy: only figures of one run are compared, contestants take turns, and each turn is made several
times. What a contestant measures it prints as one line of JSON.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata

ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def run_in_turn(
    contestants: Mapping[str, Sequence[str]], repeats: int, threads: int, *, pythons: Mapping[str, str] | None = None
) -> dict[str, dict[str, float]]:
    """Medians of what each contestant measured.

    Args:
        contestants: name to the words behind `python`.
        repeats: turns of each.
        threads: of each process.
        pythons: by name, of those that another Python runs than this one.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    for turn in range(repeats):
        for name, words in contestants.items():
            print(f"turn {turn + 1} of {repeats}: {name}", file=sys.stderr, flush=True)
            found[name].append(_measure([(pythons or {}).get(name, sys.executable), *words], threads))
    return {name: {key: statistics.median(m[key] for m in turns) for key in turns[0]} for name, turns in found.items()}


def _measure(words: Sequence[str], threads: int) -> dict[str, float]:
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def report(**measured: float) -> None:
    """Called by a contestant, once, at its end."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({**measured, "peak_mb": peak}), flush=True)


def machine(*packages: str) -> str:
    """One line about where figures come from."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, {versions}"
