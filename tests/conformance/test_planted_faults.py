"""The conformance suite goes red for the faults it is there for: each is planted in the trainer or the objective, and the
suite's own checks must raise.
"""

import math
from dataclasses import replace

import conformance_cases as suite
import pytest
import torch
from conformance_cases import ALONE, LOSSES, REDUCTIONS, UNEVEN
from test_limit_conformance import check_finite_differences, check_on_policy
from torch.autograd.gradcheck import GradcheckError

from strop import ops
from strop.algorithms import POLICY_LOSSES, PolicyObjective, TrainableTokens
from strop.ops.policy_loss import TokenLoss
from strop.trainers import TorchTrainer
from strop.types import GuardError


@pytest.fixture(autouse=True)
def nothing_remembered():
    """Neither a right result in a test with a fault, nor a wrong one after it."""
    suite.whole.cache_clear()
    suite.objective_of.cache_clear()
    yield
    suite.whole.cache_clear()
    suite.objective_of.cache_clear()


def goes_red(check, *arguments):
    with pytest.raises((AssertionError, GuardError)):
        check(*arguments)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_wrong_sign_of_the_loss_is_seen(loss, monkeypatch):
    kind = LOSSES[loss]["kind"]
    right = POLICY_LOSSES[kind]

    class Wrong(type(right)):
        def __call__(self, options, tensors):
            found = super().__call__(options, tensors)
            return TokenLoss(-found.loss, found.clipped)

    check_on_policy(loss, REDUCTIONS[0])
    monkeypatch.setitem(POLICY_LOSSES, kind, Wrong(*right))
    goes_red(check_on_policy, loss, REDUCTIONS[0])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_wrong_sign_in_the_trainer_is_seen(reduction, monkeypatch):
    right = TorchTrainer._weighted_loss

    def wrong(self, objective, kind, part, rows):
        loss, metrics = right(self, objective, kind, part, rows)
        return -loss, metrics

    monkeypatch.setattr(TorchTrainer, "_weighted_loss", wrong)
    goes_red(check_on_policy, "ppo_clip", reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_denominator_is_seen(loss, reduction, monkeypatch):
    """Each micro-batch is averaged over its own tokens, as trainers that divide by what they hold do."""
    right = TorchTrainer._weighted_loss

    def wrong(self, objective, kind, part, rows):
        weights = ops.token_weights(
            part.loss_mask,
            part.sequence_ids,
            reduction=reduction,
            group_ids=part.group_ids,
            max_response_tokens=suite.LONGEST_RESPONSE,
        )
        return right(self, objective, kind, replace(part, token_weights=weights), rows)

    name = f"{loss}-{reduction}"
    monkeypatch.setattr(TorchTrainer, "_weighted_loss", wrong)
    goes_red(suite.check_cut, name, ALONE)
    goes_red(suite.check_cut, name, UNEVEN)
    goes_red(suite.check_order, name)
    goes_red(suite.check_layout, name, "packed", UNEVEN)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_multiplied_mask_is_seen(loss, monkeypatch):
    """All tokens reach the objective, and masked ones are multiplied by 0 after it: right unless one is NaN."""

    def wrong(self, objective, kind, part, rows):
        mask = part.loss_mask
        found, _ = self._policy(part, temperature=objective.temperature, layout="padded", with_entropy=False)
        logprobs = torch.zeros(mask.shape).index_put((mask.nonzero()[:, 0],), found)
        tokens = TrainableTokens(
            logprobs=logprobs,
            entropy=None,
            old_logprobs=part.old_logprobs,
            rollout_logprobs=part.rollout_logprobs,
            ref_logprobs=None,
            advantages=part.advantages,
            sequence_ids=part.sequence_ids,
            selected=part.selected,
        )
        losses, metrics = objective.loss(tokens)
        return (part.token_weights.float() * mask * losses).sum(), metrics

    name = f"{loss}-{REDUCTIONS[0]}"
    suite.check_masked_slots(name, (math.nan,))
    monkeypatch.setattr(TorchTrainer, "_weighted_loss", wrong)
    goes_red(suite.check_masked_slots, name, (math.nan,))
    goes_red(suite.check_masked_slots, name, (math.inf, -math.inf))


def test_a_choice_made_per_micro_batch_is_seen(monkeypatch):
    right = TorchTrainer._weighted_loss

    def wrong(self, objective, kind, part, rows):
        part = suite.prepared(part, objective) if part.loss_mask.any() else part
        return right(self, objective, kind, part, rows)

    for loss in (name for name, table in LOSSES.items() if POLICY_LOSSES[table["kind"]].select is not None):
        # one token weight for all, so that only the choice can differ
        name = f"{loss}-constant_length"
        monkeypatch.setattr(ops, "token_weights", lambda mask, *_, **__: mask.double() / 50)
        suite.check_cut(name, UNEVEN)
        with monkeypatch.context() as fault:
            fault.setattr(TorchTrainer, "_weighted_loss", wrong)
            goes_red(suite.check_cut, name, UNEVEN)


def test_gradient_through_a_clipped_weight_is_seen(monkeypatch):
    """CISPO without its stop-gradient has the same loss: only its gradient is another."""
    right = PolicyObjective.loss

    def wrong(self, tokens):
        losses, metrics = right(self, tokens)
        ratio = (tokens.logprobs - tokens.old_logprobs).exp()
        return losses * ratio / ratio.detach(), metrics

    monkeypatch.setattr(PolicyObjective, "loss", wrong)
    goes_red(check_on_policy, "cispo", REDUCTIONS[0])


def test_a_wrong_gradient_of_a_custom_backward_is_seen(monkeypatch):
    right = PolicyObjective.loss

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    def wrong(self, tokens):
        losses, metrics = right(self, tokens)
        return Doubled.apply(losses), metrics

    name = f"ppo_clip-{REDUCTIONS[0]}"
    check_finite_differences(name)
    monkeypatch.setattr(PolicyObjective, "loss", wrong)
    with pytest.raises(GradcheckError):
        check_finite_differences(name)
