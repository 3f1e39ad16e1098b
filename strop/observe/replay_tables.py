"""What `strop replay` and `strop rollout` print at their end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from strop.types import Rollout


def print_replay(found: Any) -> None:
    """Loss and gradient norm of a step that was redone, and the tokens of the rollout that was asked for."""
    console = _wide_console()
    console.print(f"step {found.step}, from {found.start}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "recorded", "now"):
        table.add_column(title, justify="right" if title else "left")
    for name in ("loss", "grad_norm"):
        if name in found.now:
            then = found.then.get(name)
            table.add_row(name, "-" if then is None else repr(then), repr(found.now[name]))
    for name, checksum in found.weights.items():
        table.add_row(f"weights of the {name}", "", checksum)
    console.print(table)
    if found.rollout is not None:
        _print_tokens(console, found.rollout, found.tokens)
    if found.refusal:
        console.print(f"refused: {escape(found.refusal)}", soft_wrap=True)
    if not found.difference:
        console.print("identical" if not found.refusal else "identical: a guard stopped the run at this step")


def _print_tokens(console: Console, rollout: Rollout, tokens: Sequence[Any]) -> None:
    """One row a token; what a masked token has no number for stays empty."""
    console.print(f"{rollout.name}, reward {rollout.reward}, ended by {rollout.finish_reason}")
    if not tokens:
        why = (
            "it has no reward" if rollout.reward is None else "it was cut at the length limit, or no update reached it"
        )
        console.print(f"It is not in the loss: {rollout.excluded or why}.")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("token", "text", "mask", "rollout_logprob", "old", "now", "ratio", "advantage", "weight", "loss"):
        table.add_column(title, justify="left" if title == "text" else "right", no_wrap=True)
    for row in tokens:
        numbers = (row.rollout_logprob, row.old_logprob, row.logprob, row.ratio, row.advantage, row.weight, row.loss)
        shown = [f"{x:.6g}" for x in numbers] if row.is_trained else [""] * len(numbers)
        table.add_row(str(row.token), escape(repr(row.text)), "T" if row.is_trained else "F", *shown)
    console.print(table)
    total = sum(row.weight * row.loss for row in tokens if row.is_trained)
    console.print(f"its part of the loss, the sum of weight x loss: {total:.6g}")


_LEAST_WIDTH = 120  # where the terminal is narrower lines are broken, and no number is cut short

_COLUMNS = {
    "rollouts": "d",
    "scored": "d",
    "reward": ".4g",
    "deviation": ".3g",
    "lowest": ".4g",
    "highest": ".4g",
    "tokens": ".1f",
    "longest": "d",
    "truncated": ".1%",
}


def _wide_console() -> Console:
    console = Console(highlight=False)
    console.width = max(console.width, _LEAST_WIDTH)
    return console


def print_tallies(numbers: Mapping[str, Mapping[str, float]]) -> None:
    """A row for all rollouts, and one for those of each source."""
    table = Table(title="rewards and lengths", title_justify="left")
    table.add_column("source")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for source, found in numbers.items():
        table.add_row(
            escape(source) or "all",
            *(format(found[name], form) if name in found else "" for name, form in _COLUMNS.items()),
        )
    _wide_console().print(table)
