"""Which scored rollouts and groups are learned from."""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strop.compat.slime import SlimeGroupFilter, provide_slime_types
from strop.config.filtering import FilterOptions
from strop.rewards.function import load_function, source_file
from strop.types import FilterError, Group, Metric, Rollout, StepMetrics


@dataclass(frozen=True)
class Filtered:
    """Groups that are kept, and how many were dropped for which reason (`rollout_filter` counts rollouts)."""

    groups: list[Group]
    dropped: Counter[str]


class Filters:
    """The filters of `[filter]`: first the one on rollouts, then equal rewards, then the one on groups.

    Reasons, each a metric `dropped/REASON`: `rollout_filter`, `equal_rewards`, `group_filter` and, where a filter of slime's
    says why, `group_filter/WHY`; `no_reward` for a group without a scored rollout, which no filter is asked about.

    Args:
        options: the table `[filter]`.
        looks_at_parts: rewards are equal only if all named rewards are: the advantage normalises each alone.

    Raises:
        RewardError: a function cannot be loaded.
    """

    def __init__(self, options: FilterOptions, *, looks_at_parts: bool = False) -> None:
        self.options, self._looks_at_parts = options, looks_at_parts
        if options.group is not None and options.group_kind == "slime":
            provide_slime_types()
        load = lambda name, spec: None if spec is None else load_function(spec, option=f"filter.{name}")  # noqa: E731
        self._keeps_rollout = load("rollout", options.rollout)
        group = load("group", options.group)
        is_slime = group is not None and options.group_kind == "slime"
        self._keeps_group = SlimeGroupFilter(group, options.group_args) if is_slime else group

    def __call__(self, groups: Sequence[Group]) -> Filtered:
        """Apply the filters to scored groups; a dropped rollout stays in its group without a reward.

        Raises:
            FilterError: a function raised, or returned something else than true or false.
        """
        kept, dropped = [], Counter[str]()
        if not self.options.drops_groups:
            return Filtered(list(groups), dropped)
        for given in groups:
            group = self._with_kept_rollouts(given, dropped)
            reason = self._why_not(group)
            if reason is None:
                kept.append(group)
            else:
                dropped.update({reason.partition("/")[0], reason})
        return Filtered(kept, dropped)

    def metrics(self, dropped: Counter[str]) -> StepMetrics:
        """One metric for every reason there can be, and for what filters of slime's said."""
        options = self.options
        reasons = ["no_reward"]
        reasons += ["rollout_filter"] if options.rollout is not None else []
        reasons += ["equal_rewards"] if options.equal_rewards else []
        reasons += ["group_filter"] if options.group is not None else []
        return {f"dropped/{reason}": Metric("sum", dropped[reason]) for reason in dict.fromkeys([*reasons, *dropped])}

    def _with_kept_rollouts(self, group: Group, dropped: Counter[str]) -> Group:
        if self._keeps_rollout is None:
            return group
        rollouts = []
        for rollout in group.rollouts:
            if rollout.reward is not None and not self._ask("rollout", self._keeps_rollout, rollout, rollout):
                dropped["rollout_filter"] += 1
                rollout = replace(rollout, reward=None, reward_parts=None, excluded="rollout_filter")
            rollouts.append(rollout)
        return replace(group, rollouts=tuple(rollouts))

    def _why_not(self, group: Group) -> str | None:
        """Why a group is dropped; None if it is kept."""
        scored = tuple(r for r in group.rollouts if r.reward is not None)
        if not scored:
            return "no_reward"
        if self.options.equal_rewards and len({self._reward(r) for r in scored}) == 1:
            return "equal_rewards"
        if self._keeps_group is None or self._ask(
            "group", self._keeps_group, replace(group, rollouts=scored), scored[0]
        ):
            return None
        why = self._keeps_group.reason if isinstance(self._keeps_group, SlimeGroupFilter) else None
        return "group_filter" if why is None else f"group_filter/{why}"

    def _reward(self, rollout: Rollout) -> Any:
        parts = rollout.reward_parts if self._looks_at_parts else None
        return tuple(sorted(parts.items())) if parts else rollout.reward

    def _ask(self, name: str, function: Callable[[Any], Any], given: Any, rollout: Rollout) -> bool:
        where = f"filter.{name} = {getattr(self.options, name)!r}"
        of = f"prompt row {rollout.prompt.row}" + (f", sample {rollout.sample}" if name == "rollout" else "")
        try:
            answer = function(given)
            answer = answer.item() if hasattr(answer, "item") and getattr(answer, "shape", None) == () else answer
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            raise FilterError(
                f"{where} must return true or false, but it raised {type(error).__name__}: {error} for {of}. Mend it."
            ) from error
        if inspect.iscoroutine(answer):
            answer.close()  # it is never awaited, and says so when it is thrown away
        if not isinstance(answer, bool):
            raise FilterError(
                f"{where} must return true or false, got {answer!r} of type {type(answer).__name__} for {of}."
            )
        return answer


def filter_source(options: FilterOptions) -> str:
    """A fingerprint of the files that the filters are in; what has no file is left out."""
    digest = hashlib.sha256()
    for spec in (options.group, options.rollout):
        file = None if spec is None else source_file(spec)
        digest.update(b"" if file is None else file.read_bytes())
    return digest.hexdigest()
