"""Where in a TOML file an option is set: its physical line and column, both counted from 1."""

from __future__ import annotations

import tomllib
from typing import Any, NamedTuple


class Sources(NamedTuple):
    """Where the values of a config come from."""

    origins: dict[str, str]  # path of an option to the layer that set it
    file: str
    text: str  # of the file; empty where there is none

    def note(self, path: str) -> str:
        """Behind a sentence about an option: the layer that set it, with line and column where that is the file."""
        layers = [origin for p, origin in self.origins.items() if p == path or p.startswith(f"{path}.")]
        if not layers:
            return ""
        place = place_of(self.text, path) if layers[-1] == self.file else None
        return f" ({layers[-1]}{'' if place is None else f', line {place.line}, column {place.column}'})"


_MOST_LINES = 2000  # of a file that is looked through; the work grows with their square


class Place(NamedTuple):
    """Of the first character of an option's statement."""

    line: int
    column: int


def place_of(text: str, path: str) -> Place | None:
    """Where the file sets an option, or None where it does not.

    A file is read up to the end of each statement, until the option is there: no second parser, and right for dotted keys,
    inline tables and values over several lines. Slow (quadratic), and only used for messages.

    >>> place_of("# a run\\n[run]\\n  num_steps = [\\n  3]", "run.num_steps")
    Place(line=3, column=3)
    """
    lines, start, parts = _lines(text), 0, path.split(".")
    for end in range(1, min(len(lines), _MOST_LINES) + 1):
        try:
            values = tomllib.loads("".join(lines[:end]).removeprefix("\ufeff"))
        except (ValueError, RecursionError):
            continue  # within a value of several lines
        if _has(values, parts):
            line = lines[start].removeprefix("\ufeff")
            return Place(start + 1, _column(line, parts[-1]))
        start = end
    return None


def broken_statement(text: str) -> Place:
    """Where the first statement begins from which on a file is no TOML."""
    lines, start = _lines(text), 0
    for end in range(1, min(len(lines), _MOST_LINES) + 1):
        try:
            tomllib.loads("".join(lines[:end]))
            start = end
        except (ValueError, RecursionError):
            continue
    line = lines[min(start, len(lines) - 1)]
    return Place(start + 1, len(line) - len(line.lstrip()) + 1)


def _lines(text: str) -> list[str]:
    """TOML's lines end at a line feed; str.splitlines knows many more ends."""
    return [f"{line}\n" for line in text.split("\n")]


def _has(values: Any, parts: list[str]) -> bool:
    for part in parts:
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def _column(line: str, name: str) -> int:
    """Of the name, where an inline table has it; else of the statement."""
    indent = len(line) - len(line.lstrip())
    inline = line.find(name, line.find("{")) if "{" in line else -1
    return (inline if inline >= 0 else indent) + 1
