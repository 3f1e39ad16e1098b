"""Sets of held-out prompts, answered greedily and by sampling."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strop import interrupts
from strop.config import EvalSetOptions, RewardOptions, TrainConfig
from strop.config.evaluation import metric_prefix
from strop.observe.console import Console
from strop.rewards import Scored, Scorer, answer_key
from strop.rollout import all_in_time, mix_seed, not_there, sample_group
from strop.rollout.single_turn import Decode
from strop.runtime.scores import Score, score_answers
from strop.types import Engine, Metric, Prompt, RewardError, Rollout, Sampling


@dataclass(frozen=True)
class HeldOut:
    """A set of held-out prompts with everything that answering and scoring them takes."""

    name: str  # "" for that of eval.data
    options: EvalSetOptions  # with all values
    reward: RewardOptions
    prompts: tuple[Prompt, ...]
    scorer: Scorer


@dataclass(frozen=True)
class Evaluation:
    """What the policy did on the held-out prompts after `step` steps."""

    step: int
    scores: dict[str, Score]  # "greedy" and "sampled" for eval.data, "NAME/greedy" and "NAME/sampled" for a named set
    answers: dict[str, tuple[Rollout, ...]]  # by the name of the set, "" for eval.data

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """The answers of all sets, one set after the other."""
        return tuple(rollout for answers in self.answers.values() for rollout in answers)

    def metrics(self) -> dict[str, float]:
        """All numbers by their names in metrics.jsonl."""
        flat = {}
        for name, score in self.scores.items():
            flat |= {
                f"eval/{name}_reward": score.reward,
                f"eval/{name}_reward_low": score.low,
                f"eval/{name}_reward_high": score.high,
                f"eval/{name}_response_tokens": score.response_tokens,
                f"eval/{name}_truncated": score.truncated,
                f"eval/{name}_num_excluded": score.num_excluded,
                f"eval/{name}_num_errors": score.num_errors,
            }
            flat |= {f"eval/{name}_reward/of/{source}": reward for source, reward in score.reward_of.items()}
            prefix = metric_prefix(name.rpartition("/")[0])
            flat |= {f"{prefix}pass@{k}": found.value for k, found in score.pass_at.items()}
            flat |= {f"{prefix}maj@{k}": found.value for k, found in score.maj_at.items()}
        return {name: value for name, value in flat.items() if not math.isnan(value)}  # nothing to measure it on

    def line(self) -> str:
        """The scores in one line for a reader."""
        return "  ".join(_words(name, score) for name, score in self.scores.items())


def _words(name: str, score: Score) -> str:
    several = max(score.pass_at, default=1)
    more = {f"pass@{several}": score.pass_at[several]} if several > 1 else {}
    more |= {f"maj@{k}": found for k, found in score.maj_at.items()}
    shown = "".join(f" {title} {found.value:.3f}" for title, found in more.items())
    return f"{name} reward {score.reward:.3f} [{score.low:.3f}, {score.high:.3f}]{shown}"


async def answer_all(
    engine: Engine, sets: Sequence[HeldOut], config: TrainConfig, *, step: int, decode: Decode, console: Console
) -> Evaluation:
    """Answer and score all prompts of all sets. The random streams of the sampled answers are their own, and the same at
    every call: training draws from none of them."""
    total = sum(len(held_out.prompts) * len(_ways(held_out, config)) for held_out in sets)
    scores, answers, done = {}, {}, 0
    with console.phase("eval", total):

        async def answer(prompt: Prompt, sampling: Sampling, count: int) -> tuple[Rollout, ...]:
            nonlocal done
            seeds = [mix_seed(config.seed, prompt.row, i) for i in range(count)]
            group = await sample_group(
                engine, prompt, group_id=prompt.row, seeds=seeds, sampling=sampling, decode=decode
            )
            done += 1
            console.advance(done)
            return group.rollouts

        for held_out in sets:
            answers[held_out.name] = ()
            for way, (sampling, count) in _ways(held_out, config).items():
                groups = await all_in_time(
                    [answer(prompt, sampling, count) for prompt in held_out.prompts],
                    limit_s=config.rollout.timeout_s,
                    missing=not_there(held_out.prompts, count),
                    tell=console.warn,
                )
                scored = _scored(held_out, [r for group in groups for r in group])
                rollouts = scored.rollouts
                scores[f"{held_out.name}/{way}".removeprefix("/")] = score_answers(
                    rollouts,
                    num_samples=count if way == "sampled" else 0,
                    success_reward=config.eval.success_reward,
                    answer_key=answer_key(held_out.reward),
                    num_errors=int(scored.metrics.get("reward/num_errors", Metric("sum", 0)).value),
                )
                answers[held_out.name] += rollouts
    return Evaluation(step, scores, answers)


def _scored(held_out: HeldOut, rollouts: Sequence[Rollout]) -> Scored:
    """Answers with rewards. What is wrong with a set's own scorer is said with the names of the set's own options."""
    try:
        with interrupts.interruptible():
            return held_out.scorer(rollouts)
    except RewardError as error:
        if not held_out.name or held_out.options.reward is None:
            raise
        own = re.sub(r"(?<![\w.])reward\.", f"eval.sets.{held_out.name}.reward.", str(error))
        raise RewardError(own) from error


def _ways(held_out: HeldOut, config: TrainConfig) -> Mapping[str, tuple[Sampling, int]]:
    """How the prompts of a set are answered, and how often each way."""
    options = held_out.options
    limit, stop = response_limit(held_out.name, config)[1], config.rollout.stop_token_ids
    ways = {}
    if options.greedy:
        ways["greedy"] = (Sampling(temperature=0.0, max_response_tokens=limit, stop_token_ids=stop), 1)
    if options.num_samples:
        sampled = Sampling(options.temperature or 1.0, options.top_p or 1.0, options.top_k or 0, limit, stop)
        ways["sampled"] = (sampled, options.num_samples)
    return ways


def response_limit(set_name: str, config: TrainConfig) -> tuple[str, int]:
    """The length limit of a set's answers, and the table that it stands in."""
    own = config.eval.sets[set_name].max_response_tokens if set_name else None
    places = ((f"eval.sets.{set_name}", own), ("eval", config.eval.max_response_tokens))
    given = ((table, limit) for table, limit in places if limit is not None)
    return next(given, ("rollout", config.rollout.max_response_tokens))
