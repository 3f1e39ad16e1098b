"""Groups that wait for the next step, as a file of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from strop.types import Group, Prompt, Rollout

_FILE = "waiting.jsonl"


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


def _group(rollouts: list[Rollout]) -> Group:
    return Group(rollouts[0].group_id, rollouts[0].prompt, tuple(rollouts))


def _values(rollout: Rollout) -> dict[str, Any]:
    return {f.name: getattr(rollout, f.name) for f in fields(Rollout) if f.name != "prompt"} | {
        "row": rollout.prompt.row
    }


def _rollout(values: dict[str, Any], prompts: Sequence[Prompt]) -> Rollout:
    prompt = prompts[values.pop("row")]
    return Rollout(prompt=prompt, **{n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})
