"""Held-out prompts, answered greedily and by sampling."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from strop import interrupts
from strop.config import EvalOptions
from strop.observe.console import Console
from strop.rewards import Scorer
from strop.rollout import mix_seed, sample_group
from strop.rollout.single_turn import Decode
from strop.types import Engine, Prompt, Rollout, Sampling


@dataclass(frozen=True)
class Score:
    """Mean reward over prompts, with the half width of its 95 % confidence interval."""

    reward: float
    margin: float  # 1.96 standard errors, prompts as the independent units
    response_tokens: float
    truncated: float
    num_prompts: int
    num_excluded: int
    reward_of: dict[str, float]  # by source, where the data names sources


@dataclass(frozen=True)
class Evaluation:
    """What the policy did on the held-out prompts after `step` steps."""

    step: int
    scores: dict[str, Score]  # "greedy", "sampled"
    rollouts: tuple[Rollout, ...]

    def metrics(self) -> dict[str, float]:
        flat = {}
        for name, score in self.scores.items():
            flat |= {
                f"eval/{name}_reward": score.reward,
                f"eval/{name}_response_tokens": score.response_tokens,
                f"eval/{name}_truncated": score.truncated,
            }
            flat |= {f"eval/{name}_reward/of/{source}": reward for source, reward in score.reward_of.items()}
        return flat


async def answer_all(
    engine: Engine,
    prompts: Sequence[Prompt],
    scorer: Scorer,
    options: EvalOptions,
    *,
    max_response_tokens: int,
    stop_token_ids: tuple[int, ...],
    seed: int,
    step: int,
    decode: Decode,
    console: Console,
) -> Evaluation:
    """Answer and score all prompts. The sampled answers use the same random streams at every call."""
    limit = options.max_response_tokens or max_response_tokens
    greedy = Sampling(temperature=0.0, max_response_tokens=limit, stop_token_ids=stop_token_ids)
    sampled = Sampling(options.temperature, options.top_p, options.top_k, limit, stop_token_ids)
    ways = {"greedy": (greedy, 1)} if options.greedy else {}
    if options.num_samples:
        ways["sampled"] = (sampled, options.num_samples)
    done, scores, everything = 0, {}, []
    with console.phase("eval", len(ways) * len(prompts)):

        async def answer(prompt: Prompt, sampling: Sampling, count: int) -> tuple[Rollout, ...]:
            nonlocal done
            seeds = [mix_seed(seed, prompt.row, i) for i in range(count)]
            group = await sample_group(
                engine, prompt, group_id=prompt.row, seeds=seeds, sampling=sampling, decode=decode
            )
            done += 1
            console.advance(done)
            return group.rollouts

        for name, (sampling, count) in ways.items():
            groups = await asyncio.gather(*(answer(prompt, sampling, count) for prompt in prompts))
            with interrupts.interruptible():
                rollouts = scorer([r for group in groups for r in group]).rollouts
            scores[name] = _score(rollouts)
            everything += rollouts
    return Evaluation(step, scores, tuple(everything))


def _score(rollouts: Sequence[Rollout]) -> Score:
    by_prompt: dict[int, list[float]] = {}
    sources = {r.prompt.row: r.prompt.source for r in rollouts}
    for r in rollouts:
        if r.reward is not None:
            by_prompt.setdefault(r.prompt.row, []).append(r.reward)
    means = {row: sum(rewards) / len(rewards) for row, rewards in by_prompt.items()}
    by_source: dict[str, list[float]] = {}
    for row, mean in means.items():
        source = sources[row]
        if source is not None:
            by_source.setdefault(source, []).append(mean)
    count = len(means)
    mean = sum(means.values()) / count if count else math.nan
    variance = sum((m - mean) ** 2 for m in means.values()) / (count - 1) if count > 1 else 0.0
    return Score(
        reward=mean,
        margin=1.96 * math.sqrt(variance / count) if count else math.nan,
        response_tokens=sum(r.num_response_tokens for r in rollouts) / max(len(rollouts), 1),
        truncated=sum(r.finish_reason == "length" for r in rollouts) / max(len(rollouts), 1),
        num_prompts=count,
        num_excluded=sum(r.reward is None for r in rollouts),
        reward_of={source: sum(found) / len(found) for source, found in sorted(by_source.items())},
    )
