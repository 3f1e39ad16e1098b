"""Options classes bound to the functions they configure. Names that do not match fail here, at import."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from strop import ops
from strop.config import CISPOOptions, GroupAdvantageOptions, Options, PPOClipOptions


class Binding(NamedTuple):
    """One variant: its options class, the function it configures, and the formula with the option names as slots."""

    options: type[Options]
    function: Callable[..., Any]
    formula: Callable[[Any], list[str]]

    def __call__(self, options: Options, *tensors: Tensor) -> Any:
        return self.function(*tensors, **options.bound())


def bind(options: type[Options], function: Callable[..., Any], formula: Callable[[Any], list[str]]) -> Binding:
    """Bind an options class to a function whose keyword-only arguments are exactly its fields (all but `kind`).

    Raises:
        TypeError: a field without an argument, or an argument without a field.
    """
    fields = set(options.model_fields) - {"kind"}
    arguments = {
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    if fields != arguments:
        raise TypeError(
            f"{options.__name__} and {function.__name__} must agree: fields without an argument "
            f"{sorted(fields - arguments)}, arguments without a field {sorted(arguments - fields)}."
        )
    return Binding(options, function, formula)


def _ppo_formula(o: PPOClipOptions) -> list[str]:
    high = o.eps_clip if o.eps_clip_high is None else o.eps_clip_high
    lines = [f"loss_t = max(-A_t r_t, -A_t clip(r_t, {1 - o.eps_clip:g}, {1 + high:g}))"]
    if o.eps_clip_c is not None:
        lines.append(f"loss_t = min(loss_t, {o.eps_clip_c:g} |A_t|)   where A_t < 0   (dual clip)")
    return [*lines, "no gradient from a token whose clipped branch decides"]


def _cispo_formula(o: CISPOOptions) -> list[str]:
    low = f"{max(0.0, 1 - o.eps_clip):g}"
    return [
        f"loss_t = -stop_gradient(clip(r_t, {low}, {1 + o.eps_clip_high:g})) A_t logprobs_t",
        "gradient from every trainable token",
    ]


def _group_formula(o: GroupAdvantageOptions) -> list[str]:
    if o.normalize_std:
        return [f"A_t = (R - mean_group(R)) / (std_group(R) + {o.std_eps:g})"]
    return ["A_t = R - mean_group(R)"]


POLICY_LOSSES: dict[str, Binding] = {
    "ppo_clip": bind(PPOClipOptions, ops.ppo_clip, _ppo_formula),
    "cispo": bind(CISPOOptions, ops.cispo, _cispo_formula),
}
ADVANTAGES: dict[str, Binding] = {"group": bind(GroupAdvantageOptions, ops.group_advantages, _group_formula)}


def dual_clip_of(options: Options) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Where the dual-clip cap decides, for the losses that have one and use it."""
    if isinstance(options, PPOClipOptions) and options.eps_clip_c is not None:
        return partial(ops.dual_clipped, eps_clip_c=options.eps_clip_c)
    return None
