"""The lines that say what became of each flag."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from strop.compat.import_slime.draft import SECRET, Given, Row
from strop.compat.import_slime.not_followed import Aside
from strop.compat.import_slime.script import Flag, Script
from strop.compat.import_slime.shell import only_the_shell
from strop.compat.import_slime.written import shown

_VALUE_OF_SECRET = re.compile(rf"({'|'.join(SECRET)})[ =]\S+")


@dataclass(frozen=True)
class Account:
    """What became of each flag.

    Attributes:
        given: the flags as the script has them.
        now: every option's value in the config.
        written: those of the file.
        refused: strop's own words about values that it does not take, by option.
        unread: options whose flags have values that only the shell knows.
    """

    given: Given
    now: dict[str, Any]
    written: dict[str, Any]
    refused: dict[str, str]
    unread: frozenset[str] = field(default_factory=frozenset)

    def _flags(self, row: Row) -> str:
        return ", ".join(hidden(str(self.given.flags[flag])) for flag in row.flags) or "(slime's default)"

    def is_mapped(self, row: Row) -> bool:
        """What the file says; values that stand for the reader's own are no mapping."""
        is_option = bool(row.option) and row.option in self.written and row.option not in self.refused
        return is_option and not row.words.startswith("!")

    def is_default(self, row: Row) -> bool:
        """Flags whose option is left out of the file, since strop's default is the same."""
        is_left_out = row.option in self.now and row.option not in self.written and row.option not in self.refused
        return bool(row.flags) and (row.option == "" or is_left_out)

    def line(self, row: Row) -> str:
        words = f"  ({row.words})" if row.words else ""
        why = self._flags(row)
        if not row.flags and row.option in self.unread:
            why = "(slime's default, since the flag cannot be read)"
        return f"{why}  ->  {row.option} = {shown(self.now[row.option or ''])}{words}"

    def default_line(self, row: Row) -> str:
        words = row.words if row.option == "" else f"{row.option} is {shown(self.now[row.option or ''])}"
        return f"{self._flags(row)}  ({words})"

    def without(self, rows: Sequence[Row]) -> list[str]:
        """Flags under the reason that they share, and what stands in the file for the reader to replace."""
        by_reason: dict[str, list[str]] = {}
        for row in rows:
            if row.words.startswith("! ") and row.option in self.unread:
                by_reason.setdefault("stands for the value that could not be read.", []).append(
                    f'{row.option} = "{row.value}"'
                )
            elif row.words.startswith("! ") and row.words != "! ":
                by_reason.setdefault(f"{row.words[2:]}.", []).append(f'{row.option} = "{row.value}"')
            elif row.option is None:
                by_reason.setdefault(row.words, []).append(self._flags(row))
            elif row.option in self.refused:
                by_reason.setdefault(self._refusal(row.option), []).append(self._flags(row))
        return [f"{', '.join(flags)}\n    {reason}" for reason, flags in by_reason.items()]

    def _refusal(self, option: str) -> str:
        """Strop's own words, and the value that stands instead."""
        reason = self.refused[option]
        if option not in self.now:
            return reason
        return f"{reason} So {option} = {shown(self.now[option])}, strop's default, stands."


def oddities(script: Script, most: Callable[[Flag], int], mapped: Container[str]) -> list[str]:
    """Words that belong to no flag, and flags that stand there twice."""
    found = [f"{word}\n    belongs to no flag." for word in script.strays]
    last = {flag.name: flag for flag in script.flags}
    for flag in script.flags:
        if last[flag.name] is not flag:
            found.append(f"{hidden(str(flag))} (line {flag.line})\n    is given again later, and the last one counts.")
        elif flag.name in mapped:
            found += _extra(flag, most(flag))
    return found


def _extra(flag: Flag, most: int) -> list[str]:
    extra = flag.words[most:]
    known = [word.text for word in extra if not word.unknown]
    where = f"(line {flag.line})"
    found = [f"{' '.join(known)} {where}\n    belongs to no flag: {flag.name} takes {most}."] if known else []
    return found + [
        f"{word.text} {where}\n    {only_the_shell(word.unknown)}: flags in it are not seen."
        for word in extra
        if word.unknown
    ]


def not_followed(found: Sequence[Aside]) -> list[str]:
    """Each flag of what is not followed, under where it stands."""
    by_place: dict[str, list[str]] = {}
    for one in found:
        by_place.setdefault(one.where, []).append(f"{hidden(one.flag)} (line {one.line})")
    return [f"{', '.join(dict.fromkeys(flags))}\n    {where}: not imported." for where, flags in by_place.items()]


def hidden(text: str) -> str:
    """Without credentials."""
    return _VALUE_OF_SECRET.sub(r"\1 ...", text)
