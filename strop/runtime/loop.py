"""The loop: sample, score, weigh, learn."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from strop import interrupts
from strop.algorithms import PolicyObjective, ScoredTokens
from strop.config.advantage import NEEDS_GROUP
from strop.data import Batch, build_batch
from strop.observe.metrics_file import append_metrics
from strop.observe.rollout_file import write_rollouts
from strop.rollout import mix_seed, sample_group
from strop.runtime.evaluation import answer_all
from strop.runtime.resume import save_checkpoint
from strop.runtime.session import Session
from strop.types import Group, Metric, Prompt, RewardError, Rollout, Sampling, StepMetrics, merge_metrics


async def train_steps(session: Session) -> None:
    """Make the steps that are left. A cancelled run stops between two steps, with everything of the last one written."""
    run = session.config.run
    if session.step == 0:
        await evaluate_now(session)
        session.console.phase_seconds.clear()
    while session.step < run.num_steps:
        prompts = [session.prompts[row] for row in session.cursor.take(session.config.rollout.prompts_per_step)]
        groups = await sample(session, prompts)
        rollouts, metrics = score(session, groups)
        batch = weigh(session, rollouts)
        metrics = merge_metrics([metrics, *learn(session, batch)])
        metrics |= session.objective.adapt(metrics)
        await session.engine.update_weights(session.trainer.weights(), session.trainer.num_steps)
        session.step += 1
        if _is_due(session.step, session.config.algorithm.kl.refresh_steps) and session.objective.uses_reference:
            session.trainer.refresh_reference()
        session.cursor_state = session.cursor.state()
        try:
            if session.step == run.num_steps or _is_due(session.step, session.config.eval.every_steps):
                await evaluate_now(session)
        finally:  # the step is made, whatever becomes of its evaluation
            record(session, rollouts, metrics)
        if _is_due(session.step, run.checkpoint_every_steps):
            save_checkpoint(session)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


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
    if session.config.rollout.group_size > 1:
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
    return {
        "reward": Metric.mean(sum(values), len(values)),
        "equal_reward_groups": Metric.mean(equal, len(rewards)),
        "response_tokens": Metric.mean(sum(r.num_response_tokens for r in rollouts), len(rollouts)),
        "truncated": Metric.mean(sum(r.finish_reason == "length" for r in rollouts), len(rollouts)),
    }


def weigh(session: Session, rollouts: Sequence[Rollout]) -> Batch:
    """The batch of all scored rollouts with the log-probabilities that the formula needs, then advantages over all of
    them; only then those that do not enter the loss leave."""
    scored = [r for r in rollouts if r.reward is not None]
    with session.console.phase("logprobs", 0):
        batch = _with_needed_logprobs(session, build_batch(scored, [0.0] * len(scored)))
    advantages = session.objective.advantages(
        ScoredTokens(
            rewards=torch.tensor([r.reward for r in scored], dtype=torch.float64),
            group_ids=torch.tensor([r.group_id for r in scored], dtype=torch.int64),
            lengths=torch.tensor([r.num_response_tokens for r in scored], dtype=torch.int64),
            loss_mask=batch.loss_mask,
            sequence_ids=batch.sequence_ids,
            reward_parts=_reward_parts(scored) if session.config.algorithm.advantage.kind == "gdpo" else None,
            old_logprobs=batch.old_logprobs,
            ref_logprobs=batch.ref_logprobs,
        )
    )
    batch = replace(batch, advantages=advantages.float())
    if not session.config.algorithm.mask_truncated:
        return batch
    return batch.select([i for i, rollout in enumerate(scored) if rollout.finish_reason != "length"])


def _reward_parts(rollouts: Sequence[Rollout]) -> torch.Tensor:
    """The named rewards of each rollout as [S, K], names in alphabetical order.

    Raises:
        RewardError: no rollout has named rewards, or two have different names.
    """
    if not rollouts:
        return torch.zeros(0, 1, dtype=torch.float64)
    first, names = rollouts[0], sorted(rollouts[0].reward_parts or ())
    for other in rollouts:
        if sorted(other.reward_parts or ()) != names:
            raise RewardError(
                "algorithm.advantage.kind = gdpo needs the same named rewards of every rollout of a batch, got "
                f"{_named(first)} and {_named(other)}. Return every name each time, with 0 where it does not apply."
            )
    if not names:
        failed = " With reward.on_error = zero a score that failed is 0, and here all are 0."
        raise RewardError(
            "algorithm.advantage.kind = gdpo needs a reward function that returns several named rewards as a dict, got a plain "
            f"number for every rollout of the batch.{'' if any(r.reward for r in rollouts) else failed}"
        )
    return torch.tensor([[(r.reward_parts or {})[n] for n in names] for r in rollouts], dtype=torch.float64)


def _named(rollout: Rollout) -> str:
    what = ", ".join(sorted(rollout.reward_parts)) if rollout.reward_parts else "a plain number"
    return f"{what} for prompt row {rollout.prompt.row}, sample {rollout.sample}"


def _with_needed_logprobs(session: Session, batch: Batch) -> Batch:
    """old_logprobs and ref_logprobs, each only where the formula needs a pass for it."""
    objective, old, reference = session.objective, None, None
    if objective.options.old_logprobs == "rollout":
        old = batch.rollout_logprobs
    elif objective.needs_old_logprobs:
        old = session.trainer.logprobs(batch, model="policy", temperature=objective.temperature)
    if objective.uses_reference:
        reference = session.trainer.logprobs(batch, model="reference", temperature=objective.temperature)
    return replace(batch, old_logprobs=old, ref_logprobs=reference)


def learn(session: Session, batch: Batch) -> list[StepMetrics]:
    """The optimizer steps of a batch; what belongs to a whole step is computed before it is cut."""
    updates = session.config.algorithm.updates_per_batch
    with session.console.phase("train", updates):
        parts = _split(batch, session.step, session.config.rollout.prompts_per_step, updates)
        with _all_or_nothing(session) if updates > 1 else nullcontext():
            metrics, steps_before = [], session.trainer.num_steps
            for done, part in enumerate(parts):
                updates_done = session.trainer.num_steps - steps_before  # a part without trainable tokens makes none
                ready = prepare_update(session.objective, part, updates_done=updates_done)
                metrics.append(session.trainer.step(ready, session.objective))
                session.console.advance(done + 1)
    return metrics


def prepare_update(objective: PolicyObjective, part: Batch, *, updates_done: int) -> Batch:
    """A part of the batch as one optimizer step: its token weights, what the policy loss singles out, and what the ratio
    divides by. `updates_done`: how many updates of this batch were made before."""
    tensors = objective.step_tensors(
        loss_mask=part.loss_mask,
        sequence_ids=part.sequence_ids,
        group_ids=part.group_ids,
        old_logprobs=part.old_logprobs,
        advantages=part.advantages,
    )
    is_first, compares_now = updates_done == 0, objective.options.old_logprobs == "rollout"
    part = replace(part, **tensors, measures_gap=is_first or not compares_now)
    if not is_first or compares_now:
        return part
    # No update has been made: old policy and policy are one, and every ratio is 1. The pass that old_logprobs come from was
    # cut differently and differs by rounding, which a kink at r = 1 would turn into a gradient of the rounding's sign. With
    # None the trainer takes the step's own log-probabilities. Only now: step_tensors chooses tokens by the computed ones.
    return replace(part, old_logprobs=None)


@contextmanager
def _all_or_nothing(session: Session) -> Iterator[None]:
    """A batch whose updates cannot all be made leaves the weights from before it, for the model that is then saved."""
    before = session.trainer.copy_weights()
    session.is_within_step = True
    try:
        yield
    except BaseException:
        session.trainer.put_back(before)
        raise
    session.is_within_step = False


def _split(batch: Batch, step: int, prompts_per_step: int, updates: int) -> list[Batch]:
    """Cut a batch by prompts, groups whole, into one part per update. A part may be empty."""
    if updates == 1:
        return [batch]
    first_group, per_update = step * prompts_per_step, prompts_per_step // updates
    group_of = batch.group_ids[batch.starts].tolist()
    parts: list[list[int]] = [[] for _ in range(updates)]
    for sequence, group in enumerate(group_of):
        parts[(group - first_group) // per_update].append(sequence)
    return [batch.select(part) for part in parts]


def record(session: Session, rollouts: Sequence[Rollout], metrics: StepMetrics) -> None:
    """One line of numbers for the step, on the console and in the run folder."""
    seconds = session.console.phase_seconds
    measured = {name: metric.value for name, metric in sorted(metrics.items()) if metric.count}
    flat = {"step": session.step, **measured}
    flat |= {f"seconds/{name}": value for name, value in seconds.items()}
    num_tokens = sum(r.num_response_tokens for r in rollouts)
    flat["tokens_per_second"] = num_tokens / max(
        sum(seconds[name] for name in ("sample", "score", "logprobs", "train")), 1e-9
    )
    if session.evaluations and session.evaluations[-1].step == session.step:
        flat |= session.evaluations[-1].metrics()
    session.history.append(flat)
    append_metrics(session.folder.metrics, flat)
    if session.config.run.save_rollouts:
        write_rollouts(session.folder.rollouts / f"step_{session.step:06d}.jsonl", rollouts)
    session.console.step(session.step, session.config.run.num_steps, flat)


async def evaluate_now(session: Session) -> None:
    """Evaluate the policy as it is, if there is anything to evaluate on."""
    if not session.eval_prompts:
        return
    config = session.config
    found = await answer_all(
        session.engine,
        session.eval_prompts,
        session.scorer,
        config.eval,
        max_response_tokens=config.rollout.max_response_tokens,
        stop_token_ids=config.rollout.stop_token_ids,
        seed=config.seed,
        step=session.step,
        decode=session.decode,
        console=session.console,
    )
    session.evaluations.append(found)
    if config.run.save_rollouts:
        write_rollouts(session.folder.rollouts / f"eval_{session.step:06d}.jsonl", found.rollouts)
    numbers = "  ".join(f"{name} reward {s.reward:.3f} +- {s.margin:.3f}" for name, s in found.scores.items())
    session.console.note(f"eval after step {session.step}: {numbers}")
