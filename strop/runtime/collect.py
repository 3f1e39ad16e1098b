"""Rollouts for one step: sample a group for each prompt, score them, count what they say."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence

from strop import interrupts
from strop.config.advantage import NEEDS_GROUP
from strop.rollout import mix_seed, sample_group
from strop.runtime.session import Session
from strop.types import Group, Metric, Prompt, Rollout, Sampling, StepMetrics


async def collect(session: Session) -> tuple[list[Rollout], StepMetrics]:
    """The scored rollouts of the next step, and what they say as metrics."""
    prompts = [session.prompts[row] for row in session.cursor.take(session.config.rollout.prompts_per_step)]
    return score(session, await sample(session, prompts))


async def sample(session: Session, prompts: Sequence[Prompt]) -> list[Group]:
    """A group of rollouts for each prompt, all in flight together."""
    options = session.config.rollout
    sampling = Sampling(
        temperature=options.temperature,
        max_response_tokens=options.max_response_tokens,
        stop_token_ids=options.stop_token_ids,
    )
    done = 0

    async def one(place: int, prompt: Prompt) -> Group:
        nonlocal done
        seeds = [mix_seed(session.config.seed, session.step, place, i) for i in range(options.group_size)]
        group_id = session.step * options.prompts_per_step + place
        group = await sample_group(
            session.engine, prompt, group_id=group_id, seeds=seeds, sampling=sampling, decode=session.decode
        )
        done += 1
        session.console.advance(done * options.group_size)
        return group

    with session.console.phase("sample", len(prompts) * options.group_size):
        return await asyncio.gather(*(one(place, prompt) for place, prompt in enumerate(prompts)))


def score(session: Session, groups: Sequence[Group]) -> tuple[list[Rollout], StepMetrics]:
    """Rewards for all rollouts of the step, and what they say as metrics."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    with session.console.phase("score", len(rollouts)), interrupts.interruptible():
        scored = session.scorer(rollouts)
    metrics = {**scored.metrics, **_rollout_metrics(scored.rollouts)}
    if session.config.rollout.group_size > 1 and not session.config.distillation.alone:
        metrics["groups_of_one"] = _groups_of_one(session, scored.rollouts)
    return list(scored.rollouts), metrics


def _groups_of_one(session: Session, rollouts: Sequence[Rollout]) -> Metric:
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


def _rollout_metrics(rollouts: Sequence[Rollout]) -> StepMetrics:
    rewards: dict[int, list[float]] = {}
    for r in rollouts:
        if r.reward is not None:
            rewards.setdefault(r.group_id, []).append(r.reward)
    values = [reward for group in rewards.values() for reward in group]
    equal = sum(max(group) == min(group) for group in rewards.values())
    return reward_by_source(rollouts) | {
        "reward": Metric.mean(sum(values), len(values)),
        "equal_reward_groups": Metric.mean(equal, len(rewards)),
        "response_tokens": Metric.mean(sum(r.num_response_tokens for r in rollouts), len(rollouts)),
        "truncated": Metric.mean(sum(r.finish_reason == "length" for r in rollouts), len(rollouts)),
    }


def reward_by_source(rollouts: Iterable[Rollout]) -> StepMetrics:
    """Mean reward of each source that the data names."""
    found: dict[str, list[float]] = {}
    for r in rollouts:
        if r.prompt.source is not None and r.reward is not None:
            found.setdefault(r.prompt.source, []).append(r.reward)
    return {f"reward/of/{name}": Metric.mean(sum(rewards), len(rewards)) for name, rewards in found.items()}
