"""An evaluation on the terminal: a table of all scores with their intervals, and the first answers; or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from strop.types import Rollout

_INTERVALS = "95 % intervals over prompts: Wilson's where every prompt's value is 0 or 1, else +- 1.96 standard errors."


def print_evaluation(
    scores: Mapping[str, Any], answers: Mapping[str, Sequence[Rollout]], *, title: str, show: int, as_json: bool
) -> None:
    """Scores by name, and the first answers of each set, as tables or as one JSON object."""
    console = Console(highlight=False)
    if as_json:
        console.print_json(json.dumps({name: _finite(asdict(score)) for name, score in scores.items()}))
        return
    table = Table(title=escape(title), title_justify="left")
    has_faults = any(score.num_excluded or score.num_errors for score in scores.values())
    faults = ("left out", "scorer errors") if has_faults else ()
    for name in ("set", "score", "value", "95 % interval", "prompts", "tokens", "cut off", *faults):
        table.add_column(name, justify="left" if name in ("set", "score") else "right")
    before = None
    for name, score in scores.items():
        for row in _rows(name, score):
            more = (str(score.num_excluded), str(score.num_errors)) if faults and "reward" in row[1] else ()
            table.add_row(row[0] if row[0] != before else "", *row[1:], *more)
            before = row[0]
    console.print(table)
    console.print(f"[dim]{_INTERVALS}[/dim]")
    for name, rollouts in answers.items() if show else ():
        shown = Table("prompt", "answer", "label", "reward", title=name or None, title_justify="left")
        for r in rollouts[:show]:
            shown.add_row(*(escape(str(x)) for x in (r.prompt.text, r.text, r.prompt.label, r.reward)))
        console.print(shown)


def _rows(name: str, score: Any) -> Iterator[tuple[str, ...]]:
    """A row for the reward, and one for each pass@k and maj@k."""
    set_name, _, way = name.rpartition("/")
    counts = (str(score.num_prompts), f"{score.response_tokens:.1f}", f"{score.truncated:.1%}")
    where = set_name or "eval.data"
    yield (where, f"{way} reward", f"{score.reward:.3f}", _interval(score), *counts)
    several = {f"pass@{k}": e for k, e in score.pass_at.items()} | {f"maj@{k}": e for k, e in score.maj_at.items()}
    for title, found in several.items():
        yield (where, title, f"{found.value:.3f}", _interval(found), str(found.num_prompts), "", "")


def _interval(found: Any) -> str:
    return f"{found.low:.3f} - {found.high:.3f}" if math.isfinite(found.low) else "unknown"


def _finite(part: Any) -> Any:
    """JSON has no word for NaN and infinity: null stands for them."""
    if isinstance(part, dict):
        return {name: _finite(value) for name, value in part.items()}
    return None if isinstance(part, float) and not math.isfinite(part) else part
