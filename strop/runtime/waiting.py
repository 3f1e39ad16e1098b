"""Groups that wait for the next step, and batches that are ahead of theirs, as files of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from strop.runtime.session import Collected
from strop.types import Group, Metric, Prompt, Rollout, StepMetrics

_FILE, _AHEAD = "waiting.jsonl", "ahead.jsonl"


def write_waiting(folder: Path, groups: Sequence[Group]) -> None:
    """One group a line; prompts by their row. Nothing is written where nothing waits."""
    if groups:
        lines = [json.dumps([_values(rollout) for rollout in group.rollouts]) for group in groups]
        (folder / _FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_waiting(folder: Path, prompts: Sequence[Prompt]) -> tuple[Group, ...]:
    """What `write_waiting` wrote, bit for bit: JSON keeps every digit of a float."""
    file = folder / _FILE
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return tuple(_group([_rollout(values, prompts) for values in json.loads(line)]) for line in lines)


def write_ahead(folder: Path, batches: Sequence[Collected]) -> None:
    """One batch a line; nothing where none is ahead."""
    if batches:
        lines = [
            json.dumps({"metrics": metrics_as_json(batch.metrics), "rollouts": [_values(r) for r in batch.rollouts]})
            for batch in batches
        ]
        (folder / _AHEAD).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_ahead(folder: Path, prompts: Sequence[Prompt]) -> tuple[Collected, ...]:
    """What `write_ahead` wrote, bit for bit."""
    file = folder / _AHEAD
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    return tuple(
        Collected(tuple(_rollout(values, prompts) for values in row["rollouts"]), metrics_from_json(row["metrics"]))
        for row in rows
    )


def metrics_as_json(metrics: StepMetrics) -> dict[str, Any]:
    """What `metrics_from_json` reads again."""
    return {name: [metric.kind, metric.total, metric.count] for name, metric in metrics.items()}


def metrics_from_json(values: Mapping[str, Any]) -> StepMetrics:
    """Metrics that can be merged with others, as they were."""
    return {name: Metric(*found) for name, found in values.items()}


def _group(rollouts: list[Rollout]) -> Group:
    return Group(rollouts[0].group_id, rollouts[0].prompt, tuple(rollouts))


def _values(rollout: Rollout) -> dict[str, Any]:
    return {f.name: getattr(rollout, f.name) for f in fields(Rollout) if f.name != "prompt"} | {
        "row": rollout.prompt.row
    }


def _rollout(values: dict[str, Any], prompts: Sequence[Prompt]) -> Rollout:
    prompt = prompts[values.pop("row")]
    return Rollout(prompt=prompt, **{n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})
