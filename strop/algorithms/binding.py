"""Options classes bound to the functions they configure. Names that do not match fail here, at import."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from strop.config import Options


class Binding(NamedTuple):
    """A variant: its options class and the functions that take its fields as keyword-only arguments.

    The positional arguments of a function are tensors, called as the attributes of whatever holds them.
    """

    options: type[Options]
    function: Callable[..., Any]
    formula: Callable[[Any], list[str]]  # the mathematics with the numbers in place
    select: Callable[..., Any] | None = None  # which tokens `function` singles out, decided over a whole step
    no_gradient_where: Callable[[Any], str] | None = None  # condition on a trainable token, in the formula's letters

    def __call__(self, options: Options, tensors: Any) -> Any:
        """The function on the tensors that it names, with the options it names."""
        return _call(self.function, options, tensors)

    def selected(self, options: Options, tensors: Any) -> Any:
        """What `select` singles out."""
        assert self.select is not None
        return _call(self.select, options, tensors)


def _call(function: Callable[..., Any], options: Options, tensors: Any) -> Any:
    positional, keywords = arguments_of(function)
    values = options.bound()
    return function(*(getattr(tensors, name) for name in positional), **{name: values[name] for name in keywords})


def arguments_of(function: Callable[..., Any]) -> tuple[list[str], list[str]]:
    """Names of a function's positional and of its keyword-only arguments."""
    parameters = inspect.signature(function).parameters.values()
    keywords = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    return [p.name for p in parameters if p.name not in keywords], keywords


def bind(
    options: type[Options],
    function: Callable[..., Any],
    formula: Callable[[Any], list[str]],
    select: Callable[..., Any] | None = None,
    no_gradient_where: Callable[[Any], str] | None = None,
) -> Binding:
    """Bind an options class to functions whose keyword-only arguments are together exactly its fields (all but `kind`).

    Args: `no_gradient_where` says where a token's loss has no gradient, in letters of `formula` and words of Python such as
    "A > 0 and r > 1.2"; None where every token has one.

    Raises:
        TypeError: a field without an argument, or an argument without a field.
    """
    fields = set(options.model_fields) - {"kind"}
    arguments = {name for f in (function, select) if f is not None for name in arguments_of(f)[1]}
    if fields != arguments:
        raise TypeError(
            f"{options.__name__} and {function.__name__} must agree: fields without an argument "
            f"{sorted(fields - arguments)}, arguments without a field {sorted(arguments - fields)}."
        )
    return Binding(options, function, formula, select, no_gradient_where)
