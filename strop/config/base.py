"""The base of every options class, and how a class speaks of rules that span several of its fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, model_validator


class Problem(NamedTuple):
    """A rule that is broken. `key` is the option, relative to the class that reports it; the message begins after it."""

    key: str
    message: str


class Idle(NamedTuple):
    """An option that cannot act beside the others. It is an error if somebody set it to something of their own."""

    key: str
    reason: str


class Options(BaseModel):
    """Frozen, typed, and closed: unknown keys are errors. "none" in a file or on the command line means None."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=False,
        allow_inf_nan=True,
        use_attribute_docstrings=False,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _none_is_a_word(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        optional = {name for name, field in cls.model_fields.items() if type(None) in get_args(field.annotation)}
        return {name: None if value == "none" and name in optional else value for name, value in given.items()}

    def problems(self) -> Iterator[Problem]:
        """Rules that span several fields and are broken."""
        yield from ()

    def idle(self) -> Iterator[Idle]:
        """Options of this class that cannot act as the others are set."""
        yield from ()

    def warnings(self) -> Iterator[str]:
        """What is allowed and yet worth a word."""
        yield from ()

    def bound(self) -> dict[str, Any]:
        """The fields as keyword arguments of the function that this class is bound to: all but `kind`."""
        return {name: value for name, value in self if name != "kind"}
