"""From scored rollouts to optimizer steps: advantages over the whole batch, then its updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Literal

import torch

from strop.algorithms import PolicyObjective, ScoredTokens
from strop.config.sampling import named_weights
from strop.data import Batch, build_batch
from strop.rewards.places import with_rest
from strop.runtime.collect import newest_tokens
from strop.runtime.session import Session
from strop.types import Metric, RewardError, Rollout, StepMetrics


def weigh(session: Session, rollouts: Sequence[Rollout]) -> Batch:
    """The batch of all scored rollouts with the log-probabilities and values that the formula needs, then advantages over
    all of them; only then those that do not enter the loss leave. A teacher that is listened to alone needs no rewards."""
    teachers, alone = session.teachers, session.config.distillation.alone
    algorithm = session.config.algorithm
    scored = [r for r in rollouts if alone or r.reward is not None]
    stays = [not algorithm.mask_truncated or r.finish_reason != "length" for r in scored]
    with session.console.phase("logprobs", 0):
        batch = _with_needed_logprobs(session, build_batch(scored, [0.0] * len(scored)), stays)
        values = None if session.critic is None else session.critic.values(batch)
    if session.config.may_be_stale:
        now = session.trainer.num_steps
        fresh = [set(r.policy_versions) <= {-1, now} for r in scored]  # of others the sampler's cache has what is older
        by_token = [is_so for r, is_so in zip(scored, fresh, strict=True) for _ in r.tokens]
        batch = replace(batch, is_fresh=torch.tensor(by_token))
    if not alone:
        batch = _with_advantages(session, scored, replace(batch, old_values=values))
    if teachers is not None:  # after whitening: the signal stays in nats, and 0 where teacher and student agree
        signal = teachers.advantages(batch, [r.prompt.source for r in scored], session.console)
        batch = replace(batch, advantages=batch.advantages + signal)
    if algorithm.likelihood_coef > 0:
        batch = replace(batch, is_right=_is_right(scored, algorithm.likelihood_reward))
    if session.config.rollout.mask_older_tokens:  # only now: advantages are those of whole responses
        newest = torch.tensor([is_newest for r in scored for is_newest in newest_tokens(r)], dtype=torch.bool)
        batch = replace(batch, loss_mask=batch.loss_mask & newest)
    return batch if all(stays) else batch.select([sequence for sequence, in_loss in enumerate(stays) if in_loss])


def _is_right(rollouts: Sequence[Rollout], least: float) -> torch.Tensor:
    """Tokens [T] of responses that the scorer gave at least so much; a length penalty makes no answer wrong."""
    rewards = ((r, -math.inf if r.reward is None else r.reward - (r.length_penalty or 0.0)) for r in rollouts)
    return torch.tensor([reward >= least for r, reward in rewards for _ in r.tokens], dtype=torch.bool)


def _with_advantages(session: Session, scored: Sequence[Rollout], batch: Batch) -> Batch:
    """The algorithm's own advantages, and what a critic is to learn."""
    advantages, returns = session.objective.advantages_and_returns(
        ScoredTokens(
            rewards=torch.tensor([r.reward for r in scored], dtype=torch.float64),
            group_ids=torch.tensor([r.group_id for r in scored], dtype=torch.int64),
            lengths=torch.tensor([r.num_response_tokens for r in scored], dtype=torch.int64),
            loss_mask=batch.loss_mask,
            sequence_ids=batch.sequence_ids,
            **_named(session, scored),
            **_by_token(scored),
            old_logprobs=batch.old_logprobs,
            ref_logprobs=batch.ref_logprobs,
            values=batch.old_values,
        )
    )
    return replace(batch, advantages=advantages.float(), returns=None if returns is None else returns.float())


def _by_token(rollouts: Sequence[Rollout]) -> dict[str, torch.Tensor]:
    """What each token earns, and where one was given a reward; nothing where all rewards are for whole responses."""
    if all(r.token_rewards is None for r in rollouts):
        return {}
    given = [value for r in rollouts for value in with_rest(r)]
    return {
        "token_rewards": torch.tensor([value or 0.0 for value in given], dtype=torch.float64),
        "step_mask": torch.tensor([value is not None for value in given], dtype=torch.bool),
    }


def _named(session: Session, rollouts: Sequence[Rollout]) -> dict[str, torch.Tensor]:
    """Named rewards and their weights where they are kept apart."""
    if session.config.algorithm.advantage.kind != "gdpo":
        return {}
    parts, names = _reward_parts(rollouts)
    weights = named_weights(session.config.reward)
    by_name = torch.tensor([weights.get(name, 1.0) for name in names], dtype=torch.float64)
    return {"reward_parts": parts, "part_weights": by_name}


def _reward_parts(rollouts: Sequence[Rollout]) -> tuple[torch.Tensor, list[str]]:
    """The named rewards of each rollout as [S, K], and their names in alphabetical order.

    Raises:
        RewardError: no rollout has named rewards, or two have different names.
    """
    if not rollouts:
        return torch.zeros(0, 1, dtype=torch.float64), ["none"]
    first, names = rollouts[0], sorted(rollouts[0].reward_parts or ())
    for other in rollouts:
        if sorted(other.reward_parts or ()) != names:
            raise RewardError(
                "algorithm.advantage.kind = gdpo needs the same named rewards of every rollout of a batch, got "
                f"{_named_by(first)} and {_named_by(other)}. Return every name each time, with 0 where it does not apply."
            )
    if not names:
        failed = " With reward.on_error = zero a score that failed is 0, and here all are 0."
        raise RewardError(
            "algorithm.advantage.kind = gdpo needs a reward function that returns several named rewards as a dict, got a plain "
            f"number for every rollout of the batch.{'' if any(r.reward for r in rollouts) else failed}"
        )
    return torch.tensor([[(r.reward_parts or {})[n] for n in names] for r in rollouts], dtype=torch.float64), names


def _named_by(rollout: Rollout) -> str:
    what = ", ".join(sorted(rollout.reward_parts)) if rollout.reward_parts else "a plain number"
    return f"{what} for prompt row {rollout.prompt.row}, sample {rollout.sample}"


def _with_needed_logprobs(session: Session, batch: Batch, stays: Sequence[bool]) -> Batch:
    """old_logprobs and ref_logprobs, each only where the formula needs a pass for it; `stays`: which sequences will be in the
    loss."""
    objective, old, reference = session.objective, None, None
    if objective.options.old_logprobs == "rollout":
        old = batch.rollout_logprobs
    elif objective.needs_old_logprobs or session.teachers is not None:
        old = _old_logprobs(session, batch, stays)
    if objective.uses_reference:
        reference = _logprobs_by_update(session, batch, stays, "reference")
    return replace(batch, old_logprobs=old, ref_logprobs=reference)


def _old_logprobs(session: Session, batch: Batch, stays: Sequence[bool]) -> torch.Tensor:
    """The policy's own of before the batch; 0 for the first of several updates, which takes its own (see prepare_update),
    unless something beside the ratio needs them."""
    updates = session.config.algorithm.updates_per_batch
    takes_all = updates == 1 or session.objective.needs_old_logprobs_of_all or session.teachers is not None
    return _logprobs_by_update(session, batch, stays, "policy", first=0 if takes_all else 1)


def _logprobs_by_update(
    session: Session, batch: Batch, stays: Sequence[bool], model: Literal["policy", "reference"], *, first: int = 0
) -> torch.Tensor:
    """Log-probabilities [T] for the updates from `first` on, each in the micro-batches that the update itself will have: of
    the same weights they are the same to the bit, so that a KL of nothing has no gradient of rounding, which AdamW would
    follow like any other."""
    found = torch.zeros(batch.tokens.shape, dtype=torch.float32)
    for whole in _sequences_of_updates(batch, session)[first:]:
        for in_loss in (True, False):
            if part := [sequence for sequence in whole if stays[sequence] == in_loss]:
                found[batch.positions(part)] = session.trainer.logprobs(
                    batch.select(part), model=model, temperature=session.objective.temperature
                )
    return found


Seen = Callable[[Batch], None]  # looks at an update that is about to be made


def unseen(update: Batch) -> None:
    """Nobody looks."""


def learn(session: Session, batch: Batch, seen: Seen = unseen) -> list[StepMetrics]:
    """The optimizer steps of a batch; what belongs to a whole step is computed before it is cut."""
    updates = session.config.algorithm.updates_per_batch
    with session.console.phase("train", updates):
        parts = [batch.select(part) for part in _sequences_of_updates(batch, session)]
        with _all_or_nothing(session) if updates > 1 or session.critic is not None else nullcontext():
            metrics, steps_before = _explained_variance(batch), session.trainer.num_steps
            for done, part in enumerate(parts):
                updates_done = session.trainer.num_steps - steps_before  # a part without trainable tokens makes none
                ready = prepare_update(session.objective, part, updates_done=updates_done)
                seen(ready)
                if session.critic is not None:
                    metrics.append(session.critic.step(ready))
                if not learns_alone(session):
                    metrics.append(session.trainer.step(ready, session.objective))
                session.console.advance(done + 1)
    return metrics


def learns_alone(session: Session) -> bool:
    """True while only the critic learns."""
    return session.critic is not None and session.step < session.config.critic.only_first_steps


def _explained_variance(batch: Batch) -> list[StepMetrics]:
    """1 - var(returns - values) / var(returns), the values being those of before the batch's updates: 1 for a critic that
    foresaw everything, 0 for one that says the same of every token. Not said of returns that are all the same."""
    if batch.old_values is None or batch.returns is None:
        return []
    returns, values = (tensor[batch.loss_mask].double() for tensor in (batch.returns, batch.old_values))
    if returns.numel() < 2 or bool(returns.max() == returns.min()):
        return []
    return [{"explained_variance": Metric.mean(float(1 - (returns - values).var() / returns.var()), 1)}]


def prepare_update(objective: PolicyObjective, part: Batch, *, updates_done: int) -> Batch:
    """A part of the batch as one optimizer step: its token weights, what the policy loss singles out, and what the ratio
    divides by. `updates_done`: how many updates of this batch were made before."""
    tensors = objective.step_tensors(
        loss_mask=part.loss_mask,
        sequence_ids=part.sequence_ids,
        group_ids=part.group_ids,
        old_logprobs=part.old_logprobs,
        advantages=part.advantages,
        is_right=part.is_right,
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
    """A batch whose updates cannot all be made leaves the weights from before it, for the model that is then saved. Where a
    guard may skip the step the optimizer's moments go back too, and the run goes on as if there had been none."""
    goes_on = "skip" in session.config.guards.actions.values()
    learners = [learner for learner in (session.trainer, session.critic) if learner is not None]
    for learner in learners:
        learner.remember(moments=goes_on)
    session.is_within_step = True
    try:
        yield
    except BaseException:
        if session.trainer.ranks.is_whole:
            for learner in learners:
                learner.go_back()
            session.is_within_step = not goes_on
        raise
    finally:
        if session.trainer.ranks.is_whole:
            for learner in learners:
                learner.forget()
    session.is_within_step = False


def _sequences_of_updates(batch: Batch, session: Session) -> list[list[int]]:
    """Which sequences each update of a batch learns from: cut by prompts, groups whole. An update may have none."""
    per_step, updates = session.config.rollout.prompts_per_step, session.config.algorithm.updates_per_batch
    if updates == 1:
        return [list(range(batch.num_sequences))]
    parts: list[list[int]] = [[] for _ in range(updates)]
    for sequence, group in enumerate(batch.group_ids[batch.starts].tolist()):
        parts[(group - session.step * per_step) // (per_step // updates)].append(sequence)
    return parts
