"""Other values of an option, read off its type and its bounds: an option is varied the day it is added."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import annotated_types

from strop.config.tree import Leaf


def other_values(leaf: Leaf, value: Any) -> list[Any]:
    """Values that may be allowed and differ from `value`, the likeliest to act first.

    Raises:
        TypeError: there is no way yet to vary an option of this type.
    """
    kinds = [part for part in _parts(leaf.field.annotation) if part is not type(None)]
    found = [v for kind in kinds for v in _of_type(kind, leaf, value)]
    if type(None) in _parts(leaf.field.annotation):
        found.append(None)
    return [v for place, v in enumerate(found) if v != value and v not in found[:place]]


def _parts(annotation: Any) -> tuple[Any, ...]:
    """float and None of `float | None`; the annotation itself where it is no union."""
    is_union = type(None) in get_args(annotation)
    return get_args(annotation) if is_union else (annotation,)


def _of_type(kind: Any, leaf: Leaf, value: Any) -> list[Any]:
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if kind is bool:
        return [True, False] if value is None else [not value]
    if kind in (int, float):
        return list(_numbers(kind, leaf, value))
    if kind is str:
        return [f"{value or ''}-audit"]
    if get_origin(kind) is tuple:
        return [(3,), ()]
    if get_origin(kind) is dict:
        return [{"audit": 1}]
    raise TypeError(f"{leaf.path}: an audit has no way to vary {leaf.field.annotation}.")


def _numbers(kind: type, leaf: Leaf, value: Any) -> Iterator[Any]:
    """Just above the lower bound, where most bounds and caps begin to act; then around the value; then far away."""
    low = lower_bound(leaf)
    near = [] if value in (None, 0) else [value * 2, value / 2]
    if kind is int:
        yield from (low, low + 1, low + 2)
        yield from (int(n) for n in near)
        return
    yield from (low, low + 1e-9, low + 0.5, low + 0.75, low + 1.35, *near, 1e9)


def lower_bound(leaf: Leaf) -> Any:
    """The number given as ge or gt, or 0."""
    for constraint in leaf.field.metadata:
        if isinstance(constraint, annotated_types.Ge):
            return constraint.ge
        if isinstance(constraint, annotated_types.Gt):
            return constraint.gt
    return 0
