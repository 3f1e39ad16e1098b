"""Tables for the terminal: options with their origins, and audits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from strop.config import SFTConfig, TrainConfig
from strop.config.render import said_of
from strop.config.tree import described, values


def print_options(config: TrainConfig | SFTConfig) -> None:
    """Every option of a config: value, where it comes from, and on a wide terminal what it means."""
    console = Console(highlight=False)
    with_meaning = console.width >= 120
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("option", no_wrap=True, min_width=max(map(len, values(config))))
    for title in ("value", "from"):
        table.add_column(title, overflow="fold")
    if with_meaning:
        table.add_column("meaning", overflow="fold")
    derived = config.all_derived()
    for path, value in values(config).items():
        origin, style = config.origin(path), "dim" if config.origin(path) == "default" else "bold"
        shown = "none" if value is None else str(value)
        if path in derived:
            shown, origin = str(derived[path].value), f"derived from {derived[path].source}"
        meaning = [f"[dim]{escape(described(config, path))}[/dim]"] if with_meaning else []
        table.add_row(path, f"[{style}]{escape(shown)}[/{style}]", escape(origin), *meaning)
    console.print(table)


def print_audit(findings: Sequence[Any]) -> None:
    """What each option of an audit moved: one row an option, a table for each variant that was looked at."""
    console = Console(highlight=False)
    if console.width < 140:
        console.width = 140
    for variant, group in groupby(findings, key=lambda f: f.variant):
        title = f"with {variant}" if variant else None
        table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
        table.add_column("option", no_wrap=True, min_width=38)
        for name in ("value", "tried", "what moved", ""):
            table.add_column(name, overflow="fold")
        for finding in group:
            table.add_row(*_audit_row(finding))
        console.print(table)


def _audit_row(f: Any) -> tuple[str, ...]:
    moved = [name if how == "differs" else f"{name} {how}" for name, how in f.changes.items()]
    where = f" (in {f.scenario})" if f.scenario else ""
    more = f", and {len(moved) - 4} more" if len(moved) > 4 else ""
    style = {"acts": "green", "DEAD": "bold red", "not tried": "bold red"}.get(f.verdict, "dim")
    return (
        f"[{'dim' if f.origin == 'default' else 'bold'}]{f.path}[/]",
        escape(_short(f.value)),
        escape(", ".join(_short(v) for v in f.tried[:3])),
        escape(_first_sentence(f.reason) or ", ".join(moved[:4]) + more + where),
        f"[{style}]{f.verdict}[/]",
    )


def _first_sentence(text: str) -> str:
    return text.partition("\n")[0].partition(". ")[0]


def audit_summary(findings: Sequence[Any]) -> str:
    """How many options came to which verdict."""
    counts = Counter(f.verdict for f in findings)
    names = {"acts": "act", "DEAD": "dead", "refused": "refused beside the others", "one value": "with one value"}
    told = [f"{counts.pop(v, 0)} {names[v]}" for v in ("acts", "DEAD")]
    told += [f"{count} {names.get(verdict, verdict)}" for verdict, count in sorted(counts.items())]
    return f"{len(findings)} options: {', '.join(told)}."


def _short(value: Any, width: int = 24) -> str:
    text = "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= width else f"...{text[3 - width :]}"


def print_entries(entries: Sequence[Any]) -> None:
    """Options and what they mean, a table of the config after the other."""
    console = Console(highlight=False)
    for (table, kind), group in groupby(entries, key=lambda e: (e.table, e.kind)):
        beside = f'  with kind = "{kind}"' if kind else ""
        console.print(f"[bold]\\[{table}][/bold]{beside}" if table else "[bold]at the top[/bold]")
        for e in group:
            default = f", default {e.default}" if e.default else ", must be given"
            console.print(f"  {e.path.rpartition('.')[2]}  [dim]{escape(e.takes + default)}[/dim]")
            console.print(Padding(escape(e.description), (0, 0, 0, 6)))


def print_differences(one: TrainConfig | SFTConfig, other: TrainConfig | SFTConfig, *, titles: tuple[str, str]) -> None:
    """The options in which two configs differ, with where each value comes from."""
    now, then, console = values(one), values(other), Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("option", no_wrap=True, min_width=max(map(len, [*now, *then])))
    for title in titles:
        table.add_column(escape(title), overflow="fold")
    paths = [p for p in dict.fromkeys([*now, *then]) if now.get(p, _ABSENT) != then.get(p, _ABSENT)]
    for path in paths:
        table.add_row(path, _with_origin(one, now, path), _with_origin(other, then, path))
    console.print(table if paths else "No option differs.")


_ABSENT = object()  # an option of another kind


def _with_origin(config: TrainConfig | SFTConfig, now: Mapping[str, Any], path: str) -> str:
    if path not in now:
        return "[dim]not an option here[/dim]"
    value = "none" if now[path] is None else str(now[path])
    return f"{escape(value)} [dim]({escape(said_of(config, path, config.all_derived()))})[/dim]"
