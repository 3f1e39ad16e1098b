"""metrics.jsonl: one line of numbers a step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path


def append_metrics(path: Path, metrics: Mapping[str, float]) -> None:
    """Add one line. Numbers that JSON has no word for are written as null."""
    with path.open("a", encoding="utf-8") as file:
        file.write(_line(metrics))


def _line(metrics: Mapping[str, float]) -> str:
    return json.dumps({name: value if math.isfinite(value) else None for name, value in metrics.items()}) + "\n"


def read_metrics(path: Path) -> list[dict[str, float]]:
    """All lines that are whole; what a crash cut short or something damaged is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            row = dict(json.loads(line)) if line.endswith("\n") else {}
        except (ValueError, TypeError, RecursionError):
            continue
        if isinstance(row.get("step"), int):
            rows.append({name: math.nan if value is None else value for name, value in row.items()})
    return rows


def drop_metrics_after(path: Path, step: int) -> None:
    """Keep the lines of the steps up to `step`, the last one that a checkpoint knows of. The file is replaced whole."""
    if path.exists():
        beside = path.with_name(f".{path.name}.new")
        beside.write_text("".join(_line(row) for row in read_metrics(path) if row["step"] <= step), encoding="utf-8")
        beside.replace(path)
