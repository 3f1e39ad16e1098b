"""The flags of a launch as rules read them, and what the rules make of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from strop.compat.import_slime.script import Flag

SECRET = ("--wandb-key",)


@dataclass(frozen=True)
class Row:
    """What becomes of flags: an option with a value, or a reason why there is none. Without flags it is slime's default."""

    flags: tuple[str, ...]
    option: str | None = None
    value: Any = None
    words: str = ""


@dataclass
class Given:
    """The flags of the launch by name; of one given twice the last counts. `program`: the file that is launched."""

    flags: dict[str, Flag]
    program: str = ""

    def has(self, name: str) -> bool:
        return name in self.flags

    def text(self, name: str, default: str = "") -> str:
        """The first word after a flag; the default where the flag is not given."""
        return next(iter(self.flags[name].values), "") if name in self.flags else default

    def number(self, name: str, default: float) -> float | None:
        """The value as a number; None where it is none."""
        try:
            return float(self.text(name, str(default)))
        except ValueError:
            return None

    def count(self, name: str, default: int | None = None) -> int | None:
        """The value as a whole number; None where it is none."""
        text = self.text(name, "" if default is None else str(default))
        return int(text) if text.isdecimal() and len(text) <= 18 else None


@dataclass
class Draft:
    """The rows so far, in the order they were made. A later value of an option takes the place of an earlier one."""

    rows: list[Row] = field(default_factory=list)

    def set(self, option: str, value: Any, *flags: str, words: str = "") -> None:
        """An option gets a value, from these flags or, if there are none, from slime's default."""
        self.rows.append(Row(flags, option, value, words))

    def same(self, flag: str, words: str) -> None:
        """A flag that says what strop does anyway."""
        self.rows.append(Row((flag,), "", None, words))

    def without(self, flag: str, words: str) -> None:
        """A flag that has no counterpart."""
        self.rows.append(Row((flag,), None, None, words))

    def missing(self, option: str, value: Any, words: str) -> None:
        """What strop needs and the script does not give: a value that stands for the reader's own."""
        self.rows.append(Row((), option, value, f"! {words}"))
