"""Other values of an option, read off its type and its bounds: an option is varied the day it is added."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import ValidationError

from strop.config.tree import Leaf

CAN_VARY = "whole numbers, numbers, true and false, words of a Literal, text, tuples of these, and free tables"


def other_values(leaf: Leaf, value: Any, texts: Sequence[Any] = ()) -> list[Any]:
    """Legal values that differ from `value`, the likeliest to act first; none where this file knows of none.

    Args:
        leaf: the option.
        value: what it is now.
        texts: values that mean something here, for an option whose type does not tell: paths, columns, names.
    """
    found = list(texts)
    if not found:
        found = [v for kind in _parts(leaf.field.annotation) for v in _of_type(kind, leaf, value)]
    if type(None) in _parts(leaf.field.annotation):
        found.append(None)
    return [v for place, v in enumerate(found) if v != value and v not in found[:place] and is_legal(leaf, v)]


def is_choice(leaf: Leaf) -> bool:
    """True for an option whose every value can be tried: words of a Literal, true and false."""
    return all(part in (bool, type(None)) or get_origin(part) is Literal for part in _parts(leaf.field.annotation))


def has_one_value(leaf: Leaf) -> bool:
    """True for a word that stands for itself."""
    (*parts,) = _parts(leaf.field.annotation)
    return len(parts) == 1 and get_origin(parts[0]) is Literal and len(get_args(parts[0])) == 1


def is_legal(leaf: Leaf, value: Any) -> bool:
    """True where type and range of the option itself admit a value, whatever other options say."""
    try:
        leaf.owner.model_validate({leaf.name: value})
    except ValidationError as error:
        return all(problem["loc"][:1] != (leaf.name,) for problem in error.errors())
    return True


def _parts(annotation: Any) -> tuple[Any, ...]:
    """float and None of `float | None`; the annotation itself where it is no union."""
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if is_union else (annotation,)


def _of_type(kind: Any, leaf: Leaf, value: Any) -> list[Any]:
    if hasattr(kind, "__metadata__"):  # Annotated
        return _of_type(get_args(kind)[0], leaf, value)
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if kind is bool:
        return [True, False]
    if kind in (int, float):
        return list(_numbers(kind, leaf, value))
    if kind is str:
        return ["1.", "2+"]
    if get_origin(kind) in (tuple, list):
        entries = [v for v in _entries(get_args(kind)[0]) if v is not None]
        return [(entry,) for entry in entries] + [tuple(entries), ()]
    if get_origin(kind) is dict:
        return [{"audit": 1}]
    return []


def _entries(kind: Any) -> list[Any]:
    """Entries of a list: a number, or a text, or one of the words."""
    if hasattr(kind, "__metadata__"):
        return _entries(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return {int: [3, 5], float: [0.5, 2.0], str: ["1.", "2+"], bool: [True, False]}.get(kind, [])


def _numbers(kind: type, leaf: Leaf, value: Any) -> Iterator[Any]:
    """Just above the lower bound, where most bounds and caps begin to act; then around the value; then far away."""
    low = lower_bound(leaf)
    near = [] if value in (None, 0) else [value * 2, value / 2]
    if kind is int:
        yield from (low, low + 1, low + 2)
        yield from (int(n) for n in near)
        return
    high = [b for c in leaf.field.metadata for b in (getattr(c, "lt", None), getattr(c, "le", None)) if b is not None]
    yield from (low + 0.5, low, low + 1e-9, low + 0.75, low + 1.35, *near, 1e9)
    yield from ((low + top) / 2 for top in high)


def lower_bound(leaf: Leaf) -> Any:
    """The number given as ge or gt, or 0."""
    for constraint in leaf.field.metadata:
        if isinstance(constraint, annotated_types.Ge):
            return constraint.ge
        if isinstance(constraint, annotated_types.Gt):
            return constraint.gt
    return 0
