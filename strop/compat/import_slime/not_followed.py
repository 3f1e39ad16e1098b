"""Flags in parts of a script that are not followed, so that none of them vanishes without a line."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass

from strop.compat.import_slime.blocks import Branches, Choice, Command, Function, Group, Loop, Node
from strop.compat.import_slime.words import Array, Word

_SETS = re.compile(r"[A-Za-z_]\w*(?:\[[^\]]*\])?\+?=")


@dataclass(frozen=True)
class Aside:
    """A flag with its values as they are written, its line, and where it stands."""

    flag: str
    line: int
    where: str


def aside(nodes: Sequence[Node], where: str, functions: Container[str]) -> list[Aside]:
    """Flags of these commands: in arrays, in variables, at a launch, at a function of the script."""
    found: list[Aside] = []
    for node in nodes:
        if isinstance(node, Command):
            found += _in_command(node, where, functions)
        elif isinstance(node, Branches):
            for condition, body in node.arms:
                found += aside([*(condition or ()), *body], where, functions)
        elif isinstance(node, Choice):
            for _, body in node.arms:
                found += aside(body, where, functions)
        elif isinstance(node, Loop):
            found += aside([*node.condition, *node.body], where, functions)
        elif isinstance(node, Group):
            found += aside(node.body, where, functions)
        elif isinstance(node, Function):
            found += aside([node.body], where, functions)
    return found


def _in_command(node: Command, where: str, functions: Container[str]) -> list[Aside]:
    found: list[Aside] = []
    words = [word for word in node.words if isinstance(word, Word)]
    for word in node.words:
        if isinstance(word, Array):
            found += _flags([(str(w), w.line) for w in word.words], where)
        elif _SETS.match(word.plain):
            found += _flags([(text, word.line) for text in _SETS.sub("", str(word), count=1).split()], where)
    programs = [place for place, word in enumerate(words) if str(word).endswith(".py")]
    is_arguments = len(words) > 1 and words[0].keyword == "set" and words[1].keyword == "--"
    start = (
        programs[0] + 1 if programs else 1 if words and words[0].keyword in functions else 2 if is_arguments else None
    )
    if start is not None:
        found += _flags([(str(word), word.line) for word in words[start:]], where)
    return found


def _flags(words: list[tuple[str, int]], where: str) -> list[Aside]:
    """Words in a row, each flag with those behind it."""
    flags: list[tuple[list[str], int]] = []
    for text, line in words:
        if text.startswith("--") and len(text) > 2:
            flags.append(([text], line))
        elif flags:
            flags[-1][0].append(text)
    return [Aside(" ".join(texts), line, where) for texts, line in flags]
