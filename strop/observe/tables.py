"""Tables for the terminal: options with their origins, and evaluations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from strop.config import SFTConfig, TrainConfig
from strop.config.tree import walk
from strop.types import Rollout


def print_options(config: TrainConfig | SFTConfig) -> None:
    """Every option of a config: value, where it comes from, what it means."""
    table = Table("option", "value", "from", "meaning", box=None, pad_edge=False, header_style="bold")
    for prefix, options in walk(config):
        for name, value in options:
            path = f"{prefix}.{name}" if prefix else name
            if path in _table_paths(config):
                continue
            field = type(options).model_fields[name]
            origin = config.origins.get(path, "default")
            style = "dim" if origin == "default" else "bold"
            meaning = field.description or "which variant of this table"
            shown = "none" if value is None else str(value)
            table.add_row(path, f"[{style}]{escape(shown)}[/{style}]", escape(origin), f"[dim]{escape(meaning)}[/dim]")
    Console(highlight=False).print(table)


def _table_paths(config: TrainConfig | SFTConfig) -> set[str]:
    return {prefix for prefix, _ in walk(config)}


def print_evaluation(
    scores: Mapping[str, Any], rollouts: Sequence[Rollout], *, title: str, show: int, as_json: bool
) -> None:
    """Scores of an evaluation and the first answers, as tables or as one JSON object."""
    console = Console(highlight=False)
    if as_json:
        console.print_json(json.dumps({name: asdict(score) for name, score in scores.items()}))
        return
    table = Table("answers", "reward", "tokens", "cut off", "prompts", title=f"{title}", title_justify="left")
    for name, s in scores.items():
        reward = f"{s.reward:.3f} +- {s.margin:.3f}"
        table.add_row(name, reward, f"{s.response_tokens:.1f}", f"{s.truncated:.1%}", str(s.num_prompts))
    console.print(table)
    if show:
        answers = Table("prompt", "answer", "label", "reward")
        for r in rollouts[:show]:
            answers.add_row(*(escape(str(x)) for x in (r.prompt.text, r.text, r.prompt.label, r.reward)))
        console.print(answers)
