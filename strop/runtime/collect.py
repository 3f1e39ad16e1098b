"""Rollouts for one step: sample groups, score them, filter them until there are enough, and count what they say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from strop import interrupts
from strop.config import ServedEngineOptions
from strop.config.advantage import NEEDS_GROUP, TAKES_TOKEN_REWARDS
from strop.rewards import Ahead, penalise
from strop.rollout import TokenBudget, all_in_time, mix_seed, not_there, sample_group
from strop.runtime.session import SamplingSession
from strop.types import FilterError, Group, Metric, Prompt, Rollout, Sampling, StepMetrics, merge_metrics


async def collect(session: SamplingSession) -> tuple[list[Rollout], StepMetrics]:
    """The scored rollouts of the next step, and what they say as metrics."""
    if session.recorded is not None:
        rollouts = session.recorded.of_step(session.step + 1)
        return rollouts, rollout_metrics(rollouts)
    groups, metrics = await gather_groups(session)
    rollouts, more = rollouts_of_step(session, groups)
    if session.config.filter.surplus == "keep":
        assert session.engine is not None
        metrics |= staleness(rollouts, session.engine.policy_version)
    return rollouts, metrics | more


def rollouts_of_step(session: SamplingSession, groups: Sequence[Group]) -> tuple[list[Rollout], StepMetrics]:
    """The rollouts of the groups under their numbers in the next step, with what their length costs; and what that says."""
    first = session.step * session.config.rollout.prompts_per_step
    rollouts, metrics = penalise(
        [replace(r, group_id=first + place) for place, group in enumerate(groups) for r in group.rollouts],
        session.config.length_penalty,
        max_response_tokens=session.config.rollout.max_response_tokens,
    )
    if session.config.rollout.group_size > 1 and not session.config.distillation.alone:
        metrics = {**metrics, "groups_of_one": _groups_of_one(session, rollouts)}
    return rollouts, metrics


async def gather_groups(session: SamplingSession) -> tuple[list[Group], StepMetrics]:
    """As many groups as a step has, by as many rounds of sampling as that takes; those that wait come first.

    Raises:
        FilterError: the filters leave too little, or one fails.
    """
    options, wanted = session.config.filter, session.config.rollout.prompts_per_step
    ready, parts, dropped, rounds = list(session.waiting), [], Counter[str](), 0
    sampled_before = session.num_prompts_sampled
    while len(ready) < wanted:
        if rounds == options.max_rounds:
            raise too_few(session, len(ready), session.num_prompts_sampled - sampled_before, dropped)
        rounds += 1
        with session.scorer.ahead(session.console.advance) as ahead:
            sampled, in_flight = await sample(session, next_prompts(session, session.config.rollout.round_size), ahead)
            scored, metrics = await score(session, sampled, ahead)
        metrics |= rollout_metrics([rollout for group in scored for rollout in group.rollouts])
        observe(session, scored)
        with interrupts.interruptible():
            filtered = session.filters(scored)
        ready += filtered.groups
        dropped += filtered.dropped
        parts += [in_flight, metrics]
    groups, surplus = ready[:wanted], ready[wanted:]
    session.waiting = tuple(surplus) if options.surplus == "keep" else ()
    metrics = merge_metrics(parts) | session.cursor.metrics()
    if options.drops_groups:
        metrics |= session.filters.metrics(dropped) | {
            "rounds": Metric("sum", rounds),
            "prompts_sampled": Metric("sum", session.num_prompts_sampled - sampled_before),
            "dropped/surplus": Metric("sum", len(surplus) - len(session.waiting)),
            "waiting_groups": Metric("sum", len(session.waiting)),
        }
    return groups, metrics


def next_prompts(session: SamplingSession, count: int) -> list[tuple[int, Prompt]]:
    """So many prompts, each with its number among all that the run ever sampled; those that are owed come first."""
    owed, session.owed = session.owed[:count], session.owed[count:]
    rows = session.cursor.take(count - len(owed))
    first = session.num_prompts_sampled
    session.num_prompts_sampled += len(rows)
    return [(number, session.prompts[row]) for number, row in (*owed, *enumerate(rows, first))]


def too_few(session: SamplingSession, num_ready: int, num_sampled: int, dropped: Counter[str]) -> FilterError:
    """What to raise where filters leave too little."""
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items()) if "/" not in reason)
    return FilterError(
        f"filter.max_rounds must be enough to fill a step, got {session.config.filter.max_rounds}: step {session.step + 1} "
        f"has {num_ready} of {session.config.rollout.prompts_per_step} groups after {num_sampled} prompts. Dropped: {reasons} "
        "(rollout_filter counts rollouts, the others groups). Loosen the filters, use prompts that are neither too easy nor "
        "too hard, or raise filter.max_rounds."
    )


def observe(session: SamplingSession, groups: Sequence[Group]) -> None:
    """Tell the cursor what each prompt's group earned, whether or not it is kept."""
    for group in groups:
        rewards = [r.reward for r in group.rollouts if r.reward is not None]
        if rewards:
            session.cursor.observe(group.prompt.row, sum(rewards) / len(rewards))


def staleness(rollouts: Sequence[Rollout], now: int) -> StepMetrics:
    """By how many optimizer steps the policy, of version `now`, has moved since it sampled a rollout's oldest token."""
    ages = [age(rollout, now) for rollout in rollouts if rollout.num_response_tokens]
    return {"staleness": Metric.mean(sum(ages), len(ages)), "staleness_max": Metric("max", max(ages, default=0))}


def age(rollout: Rollout, now: int) -> int:
    """Of the oldest sampled token of a rollout that has some, in policy versions."""
    return now - min(version for version in rollout.policy_versions if version >= 0)


def newest_tokens(rollout: Rollout) -> list[bool]:
    """Entry per token: was it sampled, and by the newest of the weights that sampled the response?

    Versions [-1, 3, 3, 3, 4, 4] give [False, False, False, False, True, True].
    """
    newest = max(rollout.policy_versions)
    return [version == newest >= 0 for version in rollout.policy_versions]


async def sample(
    session: SamplingSession, prompts: Sequence[tuple[int, Prompt]], ahead: Ahead | None = None
) -> tuple[list[Group], StepMetrics]:
    """A group of rollouts for each numbered prompt, all in flight together as far as the budget of tokens goes, and how
    much of a budget was used. Each goes to `ahead` as soon as it is there."""
    options = session.config.rollout
    budget, done = TokenBudget(options.max_tokens_in_flight), 0

    async def one(turn: int, number: int, prompt: Prompt) -> Group:
        nonlocal done
        group = await sample_one(session, number, prompt, budget)
        done += 1
        session.console.advance(done * options.group_size)
        if ahead is not None:
            ahead.put(turn, group.rollouts)
        return group

    has_servers = isinstance(session.config.engine, ServedEngineOptions)
    with session.console.phase("sample", len(prompts) * options.group_size, is_idle=has_servers):
        groups = await all_in_time(
            [one(turn, number, prompt) for turn, (number, prompt) in enumerate(prompts)],
            limit_s=options.timeout_s,
            missing=not_there([prompt for _, prompt in prompts], options.group_size),
            tell=session.console.warn,
        )
    return groups, {} if budget.limit is None else {"tokens_in_flight": Metric("max", budget.most_in_flight)}


async def sample_one(session: SamplingSession, number: int, prompt: Prompt, budget: TokenBudget) -> Group:
    """The group of a numbered prompt, from which its random streams follow, once its tokens fit the budget."""
    options, engine = session.config.rollout, session.engine
    assert engine is not None
    sampling = Sampling(
        temperature=options.temperature,
        max_response_tokens=options.max_response_tokens,
        stop_token_ids=options.stop_token_ids,
    )
    place = divmod(number, options.prompts_per_step)  # without filters the step and the place in it
    seeds = [mix_seed(session.config.seed, *place, i) for i in range(options.group_size)]
    async with budget.holding(options.group_size * (len(prompt.tokens) + options.max_response_tokens)):
        return await sample_group(
            engine, prompt, group_id=number, seeds=seeds, sampling=sampling, decode=session.decode
        )


async def score(
    session: SamplingSession, groups: Sequence[Group], ahead: Ahead | None
) -> tuple[list[Group], StepMetrics]:
    """The groups with rewards for all rollouts, and what the scorer counted; of `ahead` what is not there yet is waited for."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    with session.console.phase("score", len(rollouts), is_idle=ahead is not None):
        if ahead is not None:
            scored = await ahead.scored()
        else:
            with interrupts.interruptible():
                scored = session.scorer(rollouts, session.console.advance)
    tell_of_added_rewards(session, scored.rollouts)
    results = iter(scored.rollouts)
    found = [replace(group, rollouts=tuple(next(results) for _ in group.rollouts)) for group in groups]
    return found, scored.metrics


def _groups_of_one(session: SamplingSession, rollouts: Sequence[Rollout]) -> Metric:
    """How many groups are left with one scored rollout; said once where that makes its advantage 0."""
    sizes = Counter(r.group_id for r in rollouts if r.reward is not None)
    alone = sum(size == 1 for size in sizes.values())
    kind = session.config.algorithm.advantage.kind
    if alone and kind in NEEDS_GROUP and not session.has_told_of_group_of_one:
        session.has_told_of_group_of_one = True
        session.console.warn(
            f"{alone} of {len(sizes)} groups have one scored rollout left: with algorithm.advantage.kind = {kind} its "
            "advantage is 0. The metric groups_of_one counts them from here on."
        )
    return Metric("sum", alone)


def tell_of_added_rewards(session: SamplingSession, rollouts: Sequence[Rollout]) -> None:
    """Say once that tokens or turns were rewarded and it does not matter which."""
    kind = session.config.algorithm.advantage.kind
    has_places = any(r.token_rewards is not None for r in rollouts)
    takes_none = session.config.distillation.alone  # rewards are only measured
    if has_places and not takes_none and kind not in TAKES_TOKEN_REWARDS and not session.has_told_of_added_rewards:
        session.has_told_of_added_rewards = True
        session.console.warn(
            f"the reward function gives rewards to tokens or turns; algorithm.advantage.kind = {kind} takes their sum, and "
            f"which of them earned it does not matter. The kinds for which it does: {', '.join(TAKES_TOKEN_REWARDS)}."
        )


def rollout_metrics(rollouts: Sequence[Rollout]) -> StepMetrics:
    """What scored rollouts say as metrics."""
    rewards: dict[int, list[float]] = {}
    for r in rollouts:
        if r.reward is not None:
            rewards.setdefault(r.group_id, []).append(r.reward)
    values = [reward for group in rewards.values() for reward in group]
    equal = sum(max(group) == min(group) for group in rewards.values())
    return (
        reward_by_source(rollouts)
        | _reward_by_name(rollouts)
        | {
            "reward": Metric.mean(sum(values), len(values)),
            "equal_reward_groups": Metric.mean(equal, len(rewards)),
            "response_tokens": Metric.mean(sum(r.num_response_tokens for r in rollouts), len(rollouts)),
            "truncated": Metric.mean(sum(r.finish_reason == "length" for r in rollouts), len(rollouts)),
        }
    )


def _reward_by_name(rollouts: Iterable[Rollout]) -> StepMetrics:
    """Mean of each named reward, without its weight."""
    found: dict[str, list[float]] = {}
    for r in rollouts:
        for name, value in (r.reward_parts or {}).items():
            found.setdefault(name, []).append(value)
    return {f"reward/part/{name}": Metric.mean(sum(values), len(values)) for name, values in found.items()}


def reward_by_source(rollouts: Iterable[Rollout]) -> StepMetrics:
    """Mean reward of each source that the data names."""
    found: dict[str, list[float]] = {}
    for r in rollouts:
        if r.prompt.source is not None and r.reward is not None:
            found.setdefault(r.prompt.source, []).append(r.reward)
    return {f"reward/of/{name}": Metric.mean(sum(rewards), len(rewards)) for name, rewards in found.items()}
