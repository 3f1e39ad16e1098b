"""The base of every options class, and how a class speaks of rules that span several of its fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator


class FlagText(str):
    """Text that was given as a flag or in Python, and is read as whatever its option takes; in a file text is text."""


class _Refused:
    """In place of a value that would be taken for something else than it says; no option takes it."""

    def __init__(self, words: str) -> None:
        self._words = words

    def __repr__(self) -> str:
        return self._words


class Problem(NamedTuple):
    """A rule that is broken. `key` is the option, relative to the class that reports it; the message begins after it."""

    key: str
    message: str


class Idle(NamedTuple):
    """An option that cannot act beside the others. It is an error if somebody set it to something of their own."""

    key: str
    reason: str


class Derived(NamedTuple):
    """What an option stands for that was left to follow from another one."""

    key: str
    value: Any
    source: str  # the option, or what else it follows from


LEAST_COEFFICIENT = 1e-12  # less is lost beside anything else in float32


def not_negligible(key: str, value: float) -> Iterator[Problem]:
    """The rule of a coefficient that is either 0 or does something."""
    if 0 < abs(value) < LEAST_COEFFICIENT:
        yield Problem(
            key, f"must be 0 or at least {LEAST_COEFFICIENT:g} in size, got {value:g}: less rounds to nothing. Set 0."
        )


class Options(BaseModel):
    """Frozen, typed, and closed: unknown keys are errors. "none" in a file or on the command line means None; true and
    false are no numbers, and neither is a number infinite unless its field says so."""

    why_not: ClassVar[dict[str, str]] = {}  # option of another kind of the table: why this kind has none

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=False,
        allow_inf_nan=False,
        use_attribute_docstrings=False,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _none_is_a_word(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: cls._word(name, value) for name, value in given.items()}

    @classmethod
    def _word(cls, name: str, value: Any) -> Any:
        if name not in cls.model_fields:
            return value
        types = _types(cls.model_fields[name].annotation)
        if isinstance(value, str) and value == "none" and type(None) in types:
            return None
        if isinstance(value, list | tuple):
            return [_as_written(item, types) for item in value]
        return _as_written(value, types)

    def problems(self) -> Iterator[Problem]:
        """Rules that span several fields and are broken."""
        yield from ()

    def idle(self) -> Iterator[Idle]:
        """Options of this class that cannot act as the others are set."""
        yield from ()

    def derived(self) -> Iterator[Derived]:
        """What the options stand for that are left to follow from others."""
        yield from ()

    def choices(self) -> dict[str, list[Any]]:
        """Values that options of text may take as the others are set: an audit tries them."""
        return {}

    def warnings(self) -> Iterator[str]:
        """What is allowed and yet worth a word."""
        yield from ()

    def bound(self) -> dict[str, Any]:
        """The fields as keyword arguments of the function that this class is bound to: all but `kind`."""
        return {name: value for name, value in self if name != "kind"}


def _types(annotation: Any) -> set[Any]:
    """int, float, bool, ... of an annotation, also those within a union or a tuple."""
    inner = [found for part in get_args(annotation) for found in _types(part)]
    return {get_origin(annotation) or annotation, *inner}


def _as_written(value: Any, types: set[Any]) -> Any:
    """A value unless it would be converted into one of another type."""
    if isinstance(value, FlagText):
        return str(value)
    if isinstance(value, str) and types & {int, float, bool} and not types & {str, Literal}:
        return _Refused(f"the text {value!r}")
    if isinstance(value, bool) and bool not in types and types & {int, float}:
        return _Refused(str(value).lower())
    if isinstance(value, int | float) and not isinstance(value, bool) and bool in types:
        return _Refused(f"the number {value}")
    return value
