"""Whether a condition of a shell script holds, as far as that is known before the script runs."""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Callable, Sequence

from strop.compat.import_slime import sums
from strop.compat.import_slime.text import Text
from strop.compat.import_slime.values import Variables
from strop.compat.import_slime.words import Word

_BRACKETS = {"[": "]", "[[": "]]", "test": ""}
_COUNTS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


def is_test(words: Sequence[Word]) -> bool:
    """Whether a command only asks something."""
    first = words[0]
    return first.keyword in ("true", "false", ":", *_BRACKETS) or first.parts[0].kind == "arithmetic"


def holds(words: Sequence[Word], variables: Variables) -> bool | None:
    """Whether a test holds; None where it depends on what only the shell knows, or on files."""
    first = words[0]
    if first.keyword in ("true", "false", ":"):
        return first.keyword != "false"
    if first.parts[0].kind == "arithmetic":
        value = variables.number(first.parts[0].text, first.line)
        return None if value is None else value != 0
    inside = list(words[1:])
    if inside and inside[-1].keyword == _BRACKETS[first.keyword]:
        inside.pop()
    return _any(inside, variables, fits=first.keyword == "[[")


def _any(words: list[Word], variables: Variables, *, fits: bool) -> bool | None:
    """Tests with && and ||; `fits` where the right side of == is a pattern."""
    found: list[bool | None] = [True]
    is_or = False
    rest = [*words, None]
    test: list[Word] = []
    for word in rest:
        mark = word.keyword if word is not None else ""
        if word is not None and mark not in ("&&", "||", "-a", "-o"):
            test.append(word)
            continue
        value = _one(test, variables, fits=fits)
        found = [*found, value] if is_or else [*found[:-1], _and(found[-1], value)]
        is_or, test = mark in ("||", "-o"), []
    return True if True in found else None if None in found else False


def _and(a: bool | None, b: bool | None) -> bool | None:
    return False if a is False or b is False else None if a is None or b is None else True


def _one(words: list[Word], variables: Variables, *, fits: bool) -> bool | None:
    if words and words[0].keyword == "!":
        value = _one(words[1:], variables, fits=fits)
        return None if value is None else not value
    texts = [text for word in words for text in variables.expand(word)] if not fits else _each(words, variables)
    known = [_without_arguments(text) for text in texts]
    if any(text is None for text in known):
        return None
    match [text or "" for text in known]:
        case [] | ["-n"]:
            return False
        case ["-z"]:
            return True
        case [text]:
            return text != ""
        case ["-n" | "-z" as name, text]:
            return (text != "") == (name == "-n")
        case [left, "=" | "==" | "!=" as name, right]:
            is_same = fnmatch.fnmatchcase(left, right) if fits else left == right
            return is_same == (name != "!=")
        case [left, name, right] if name in _COUNTS and sums.is_number(left) and sums.is_number(right):
            return _COUNTS[name](int(left), int(right))
        case _:
            return None


def _each(words: list[Word], variables: Variables) -> list[Text]:
    """In [[ ]] a word stays one word."""
    return [variables.whole(word.parts, word.line) for word in words]


def _without_arguments(text: Text) -> str | None:
    """What a word is if the script is given no arguments of its own; None where it is not known even then."""
    if any(not source.strip("${}").isdigit() for source in text.unknown):
        return None
    return "".join(piece.text for piece in text.pieces if piece.is_known)
