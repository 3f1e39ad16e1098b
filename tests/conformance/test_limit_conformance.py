"""Every policy loss against what it must become where its machinery cannot act, computed by transformers and torch alone; and
its gradient against finite differences.
"""

import itertools
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import annotated_types
import conformance_cases as suite
import pytest
import torch
from conformance_cases import CASES, LOSSES, REDUCTIONS

from strop.algorithms import POLICY_LOSSES, TrainableTokens

# A loss that has no such limit is named here with the reason; one that is not named must have it.
LEAVES_OUT_SELECTED = {"clip_cov"}  # on-policy it is REINFORCE on the others
NO_IMPORTANCE_SAMPLING_LIMIT = {
    "reinforce": "takes no ratio",
    "gspo": "the ratio of the sequence, not of the token",
    "gspo_token": "the ratio of the sequence, not of the token",
    "gmpo": "the mean log-ratio of the sequence",
    "topr": "good answers take no ratio, bad ones that of the sequence",
    "aspo": "turns the ratio of good tokens over",
}
# float64 logprobs against float32: 1e-6 of a log-probability, times ratios of up to 9 and sums that cancel
PLAIN_RELATIVE = 1e-4


def check_plain(gradients, wanted):
    assert any(gradient.abs().max() > 1e-3 for gradient in wanted.values()), "no gradient: nothing was compared"
    for name, gradient in wanted.items():
        difference, size = (gradients[name] - gradient).abs().max(), gradient.abs().max()
        assert difference <= PLAIN_RELATIVE * size, f"{name}: {difference:.3g} of {size:.3g}"


# ---- the whole step, put together again -----------------------------------------------------------------------------


def tokens_of(batch, logprobs):
    """The trainable tokens of a batch at these logprobs [N], in their precision."""
    mask = batch.loss_mask

    def pick(values):
        return values[mask].to(logprobs.dtype)

    return TrainableTokens(
        logprobs=logprobs,
        entropy=None,
        old_logprobs=pick(batch.old_logprobs),
        rollout_logprobs=pick(batch.rollout_logprobs),
        ref_logprobs=pick(batch.ref_logprobs),
        advantages=pick(batch.advantages),
        sequence_ids=batch.sequence_ids[mask],
        selected=None if batch.selected is None else batch.selected[mask],
    )


@pytest.mark.parametrize("name", [name for name, algorithm in CASES.items() if "entropy_coef" not in algorithm])
def test_a_step_is_the_objective_weighed_by_counting(name):
    # The objective's own losses, on logprobs by transformers alone, with weights counted in Python.
    objective = suite.objective_of(name)
    batch = suite.prepared(suite.made_batch(), objective)
    weights = suite.plain_weights(batch, objective.options.reduction)
    loss, wanted = suite.plain_gradients(batch, weights, lambda x: objective.loss(tokens_of(batch, x))[0])
    metrics, gradients = suite.whole(name)
    assert metrics["loss"] == pytest.approx(loss, rel=PLAIN_RELATIVE, abs=1e-5)
    check_plain(gradients, wanted)


# ---- limits ---------------------------------------------------------------------------------------------------------


def check_on_policy(loss, reduction):
    """Where old = current, the gradient is that of REINFORCE: -A by each logprob."""
    objective = suite.make_objective({"policy_loss": LOSSES[loss], "reduction": reduction})
    # as the first update of a batch; what is selected depends on old_logprobs that differ
    batch = suite.prepared(suite.made_batch(), objective, updates_done=0)
    _, gradients = suite.stepped(batch, objective)
    advantages = batch.advantages.double()
    if LOSSES[loss]["kind"] in LEAVES_OUT_SELECTED:
        assert batch.selected.any()
        advantages = advantages * ~batch.selected
    advantages = advantages[batch.loss_mask]
    _, wanted = suite.plain_gradients(batch, suite.plain_weights(batch, reduction), lambda x: -advantages * x)
    check_plain(gradients, wanted)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy_the_gradient_is_that_of_reinforce(loss, reduction):
    check_on_policy(loss, reduction)


def without_bounds(loss):
    """Its options with every bound as far out as its class allows, gates as open, penalties and selections at nothing."""
    options_class, table = POLICY_LOSSES[LOSSES[loss]["kind"]].options, dict(LOSSES[loss])
    for name, field in options_class.model_fields.items():
        if name.startswith("tau_"):
            table[name] = 1e-3
        elif name == "eps_clip_c":
            table.pop(name, None)  # none: no cap beside the band
        elif name.startswith("max_divergence") and table.get("divergence", "tv") == "tv":
            table[name] = 1.0  # of probabilities: none differ by more
        elif name.startswith(("eps_clip", "max_")):
            table[name] = farthest(field)
        elif name.endswith("_coef"):
            table[name] = 1e-12
    if {"cov_low", "cov_high"} <= set(options_class.model_fields):
        table |= {"cov_low": 1e8, "cov_high": 1e9}  # a band of covariances in which nothing is
    return table


def farthest(field):
    for bound in field.metadata:
        if isinstance(bound, annotated_types.Lt):
            return bound.lt - 1e-9
        if isinstance(bound, annotated_types.Le):
            return bound.le
    return 1e9


def without_bounds_and_plain(loss, reduction):
    """Gradients of a step without bounds, and those of importance sampling: -A r by each logprob."""
    objective = suite.make_objective({"policy_loss": without_bounds(loss), "reduction": reduction})
    batch = suite.prepared(suite.made_batch(), objective)
    _, gradients = suite.stepped(batch, objective)
    old, advantages = (getattr(batch, n)[batch.loss_mask].double() for n in ("old_logprobs", "advantages"))
    weights = suite.plain_weights(batch, reduction)
    return gradients, suite.plain_gradients(batch, weights, lambda x: -advantages * (x - old).exp())[1]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", [n for n, t in LOSSES.items() if t["kind"] not in NO_IMPORTANCE_SAMPLING_LIMIT])
def test_without_bounds_the_gradient_is_that_of_importance_sampling(loss, reduction):
    gradients, wanted = without_bounds_and_plain(loss, reduction)
    # sapo's gate at tau = 1e-3 is open up to (tau (r - 1) / 2)^2 < 2e-5
    check_plain(gradients, wanted)


@pytest.mark.parametrize("loss", [n for n, t in LOSSES.items() if t["kind"] in NO_IMPORTANCE_SAMPLING_LIMIT])
def test_the_losses_said_to_have_no_such_limit_have_none(loss):
    gradients, wanted = without_bounds_and_plain(loss, "token_mean")
    with pytest.raises(AssertionError, match=" of "):
        check_plain(gradients, wanted)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", ["gspo", "gspo_token"])
def test_gspo_of_one_token_sequences_is_ppo_clip(loss, reduction):
    batch = suite.made_batch(suite.ONE_TOKEN_ROWS)
    assert set(
        batch.loss_mask.long().new_zeros(10).index_add(0, batch.sequence_ids, batch.loss_mask.long()).tolist()
    ) == {1}
    found = []
    for kind in (loss, "ppo_clip"):
        band = {"kind": kind, "eps_clip": 0.2, "eps_clip_high": 0.28}
        objective = suite.make_objective({"policy_loss": band, "reduction": reduction})
        found.append(suite.stepped(suite.prepared(batch, objective), objective))
    assert 0 < found[1][0]["clip_fraction"] < 1
    suite.check_same(*found)


@pytest.mark.parametrize("correction", [None, *suite.CORRECTION_TABLES])
@pytest.mark.parametrize("loss", LOSSES)
def test_where_all_weights_are_equal_each_reduction_is_the_plain_mean(loss, correction):
    # Four prompts of two responses of three tokens, at most three: every reduction weighs a token by 1 / 24.
    batch = suite.made_batch(suite.EQUAL_ROWS)
    for reduction in REDUCTIONS:
        table = suite.CORRECTION_TABLES.get(correction, {"kind": "none"})
        algorithm = {"policy_loss": LOSSES[loss], "reduction": reduction, "correction": table}
        objective = suite.make_objective(algorithm, max_response_tokens=3)
        ready = suite.prepared(batch, objective)
        if reduction == REDUCTIONS[0]:
            model = suite.llama()
            tokens = tokens_of(ready, suite.plain_logprobs(model, ready)[ready.loss_mask])
            mean = objective.loss(tokens)[0].mean()
            mean.backward()
            wanted = {name: p.grad for name, p in model.named_parameters()}
        metrics, gradients = suite.stepped(ready, objective, budget=suite.UNEVEN)
        suite.check_numbers({"loss": metrics["loss"]}, {"loss": mean.item()})
        suite.check_gradients(gradients, wanted)


# ---- finite differences ---------------------------------------------------------------------------------------------


@contextmanager
def held_constant(tape):
    """Whatever is detached inside is recorded on an empty tape, and read from a full one: a stop-gradient is a constant
    to finite differences too."""
    real, is_recording, place = torch.Tensor.detach, not tape, itertools.count()

    def detach(tensor):
        if is_recording:
            tape.append(real(tensor).clone())
            return tape[-1]
        return tape[next(place)]

    with mock.patch.object(torch.Tensor, "detach", detach):
        yield


def check_finite_differences(name):
    objective = suite.objective_of(name)
    batch = suite.prepared(suite.made_batch(), objective).select((0, 1, 3, 5, 9))
    with torch.no_grad():
        logprobs = suite.plain_logprobs(suite.llama(torch.float64), batch)[batch.loss_mask]
    tape = []

    def loss(x):
        with held_constant(tape):
            found = objective.loss(replace(tokens_of(batch, x), entropy=torch.ones_like(x)))[0]
        assert found.dtype == torch.float64
        return found

    loss(logprobs)
    # No offset of the batch lies within 1e-6, the step of the differences, of a bound.
    assert torch.autograd.gradcheck(loss, (logprobs.requires_grad_(),))


ONE_REDUCTION = [n for n, a in CASES.items() if a.get("reduction", REDUCTIONS[0]) == REDUCTIONS[0]]


@pytest.mark.parametrize("name", ONE_REDUCTION)
def test_the_gradient_is_that_of_finite_differences(name):
    check_finite_differences(name)
