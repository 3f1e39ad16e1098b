"""Where in a response a reward lands: on a token, on the last token of a turn, or on the last of all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from strop.types import Rollout, TokenRewards, TurnRewards

Places = tuple[float | None, ...]  # entry per token of a rollout, None where it is given no reward


def tokens_of_policy(rollout: Rollout) -> list[int]:
    """Places of the tokens that the policy wrote."""
    return [place for place, is_sampled in enumerate(rollout.response_mask) if is_sampled]


def ends_of_turns(rollout: Rollout) -> list[int]:
    """Places of the last tokens of the policy's turns: runs of tokens that it wrote without a break.

    >>> from strop.types import Prompt
    >>> mask = (False, True, True, False, True)
    >>> rollout = Rollout(Prompt(0, (5,), ""), 0, 0, (5, 6, 7, 8, 9), mask, (0.0,) * 5, (0,) * 5, "stop", text="")
    >>> ends_of_turns(rollout)
    [2, 4]
    """
    following = (*rollout.response_mask[1:], False)
    return [i for i, (now, next_) in enumerate(zip(rollout.response_mask, following, strict=True)) if now and not next_]


def placed(rollout: Rollout, given: TokenRewards | TurnRewards) -> Places:
    """Rewards that a scorer gave to tokens or turns, each at its token.

    Raises:
        ValueError: there are more or fewer than tokens or turns; the message holds both counts.
    """
    is_by_token = isinstance(given, TokenRewards)
    at = tokens_of_policy(rollout) if is_by_token else ends_of_turns(rollout)
    if len(given.values) != len(at):
        what = "token that the policy wrote" if is_by_token else "turn of the policy"
        raise ValueError(
            f"one number for each {what}, got {len(given.values)} for {len(at)}{_hint(rollout, given, len(at))}"
        )
    found: list[float | None] = [None] * len(rollout.tokens)
    for place, value in zip(at, given.values, strict=True):
        found[place] = value
    return tuple(found)


def _hint(rollout: Rollout, given: TokenRewards | TurnRewards, wanted: int) -> str:
    after_prompt = len(rollout.tokens) - len(rollout.prompt.tokens)
    if isinstance(given, TokenRewards) and wanted != len(given.values) in (after_prompt, len(rollout.tokens)):
        return ". Tokens of the prompt, or that a tool wrote, are given none: leave out where response_mask is False."
    return ""


def added(rows: Sequence[Places]) -> Places:
    """Token by token the sum of what was given, None where nobody gave one."""
    return tuple(_sum(values) for values in zip(*rows, strict=True))


def _sum(values: Iterable[float | None]) -> float | None:
    given = [value for value in values if value is not None]
    return sum(given) if given else None


def total(places: Places) -> float:
    """What all tokens earn together."""
    return sum(value for value in places if value is not None)


def with_rest(rollout: Rollout) -> Places:
    """What each token earns, all of `rollout.reward`: what no token was given is earned by the last that the policy wrote,
    so that a number for the whole response lands there, and what was added to or taken from `reward` later."""
    assert rollout.reward is not None, "a rollout without a score earns nothing"
    found: list[float | None] = list(rollout.token_rewards or (None,) * len(rollout.tokens))
    rest = rollout.reward - total(tuple(found))
    at = tokens_of_policy(rollout)
    if at and (rest or rollout.token_rewards is None):
        found[at[-1]] = (found[at[-1]] or 0.0) + rest
    return tuple(found)
