"""What is masked cannot reach the loss; what is not finite stops the step before the optimizer, and says whose it is."""

import math
from dataclasses import replace

import pytest
import tiny_models
import torch
from made_batches import (
    make_batch,
    make_objective,
    make_trainer,
    parameters,
    random_rows,
    same_tensors,
    saved_state,
    seen_gradients,
)

from strop.types import GuardError

FIELDS = ["old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages"]
PPO_AND_KL = {"policy_loss": {"kind": "ppo_clip", "eps_clip_c": 3.0}, "kl": {"coef": 0.1}, "entropy_coef": 0.01}
ROWS = (([3, 4], [5, 6, 7]), ([8], [9, 2]), ([1, 2, 3], [4]))  # the middle one's tokens are flat 5, 6, 7


def full_batch(**changes):
    """Three sequences with every field a formula can read, in the size of real numbers."""
    batch = make_batch(*ROWS, advantages=[1.0, -0.5, 0.25])
    generator = torch.Generator().manual_seed(1)
    noise = {name: -3 + torch.rand(batch.tokens.shape, generator=generator) for name in FIELDS[:3]}
    return replace(batch, **noise | changes)


def planted(field, value, *, masked):
    """The batch with this value in all masked slots of a field, or in one trainable slot of the middle sequence."""
    batch = full_batch()
    values = getattr(batch, field).clone()
    values[~batch.loss_mask if masked else torch.tensor([6])] = value
    return replace(batch, **{field: values})


def after_a_step(batch, **options):
    """Loss, gradients and weights of one step with every term on."""
    model = tiny_models.llama()
    trainer = make_trainer(model, lr=0.01, **options)
    with seen_gradients(model) as gradients:
        metrics = trainer.step(batch, make_objective(**PPO_AND_KL))
    return {n: m.value for n, m in metrics.items()}, gradients, parameters(model)


# ---- masked slots (cases 14 and 15) ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e30])
@pytest.mark.parametrize("field", FIELDS)
def test_whatever_is_in_masked_slots_changes_nothing_bit_for_bit(field, value, layout):
    options = {"layout": layout, "max_tokens_per_micro_batch": 6}
    metrics, gradients, weights = after_a_step(full_batch(), **options)
    found = after_a_step(planted(field, value, masked=True), **options)
    assert found[0] == metrics
    assert same_tensors(found[1], gradients)
    assert same_tensors(found[2], weights)


@pytest.mark.parametrize("field", ["ref_logprobs"])
def test_a_field_that_no_term_reads_may_hold_anything(field):
    # case 15: KL coefficient 0 with a reference of -inf on a trainable token
    trainer = make_trainer(tiny_models.llama())
    metrics = trainer.step(planted(field, -math.inf, masked=False), make_objective(kl={"coef": 0.0}))
    assert math.isfinite(metrics["loss"].value)


# ---- unmasked slots --------------------------------------------------------------------------------------------------


def refused_step(model, batch, tmp_path, objective=None, **options):
    """The message of the GuardError of a second step, after proof that it left weights, moments and count alone."""
    trainer = make_trainer(model, lr=0.01, weight_decay=0.1, **options)
    trainer.step(full_batch(), make_objective(**PPO_AND_KL))
    weights, state = parameters(model), saved_state(trainer, tmp_path / "before")
    with pytest.raises(GuardError) as error:
        trainer.step(batch, objective or make_objective(**PPO_AND_KL))
    assert trainer.num_steps == 1
    assert same_tensors(weights, parameters(model))
    assert saved_state(trainer, tmp_path / "after") == state
    # nothing of the refused step is left in the gradients either
    trainer.step(full_batch(), make_objective(**PPO_AND_KL))
    twice = make_trainer(other := tiny_models.llama(), lr=0.01, weight_decay=0.1, **options)
    for _ in range(2):
        twice.step(full_batch(), make_objective(**PPO_AND_KL))
    assert same_tensors(parameters(model), parameters(other))
    return str(error.value)


@pytest.mark.parametrize("budget", [1, 1000])
@pytest.mark.parametrize("field", ["old_logprobs", "ref_logprobs", "advantages"])
def test_nan_in_a_trainable_slot_stops_the_step_and_names_its_sequence(field, budget, tmp_path):
    batch = planted(field, math.nan, masked=False)
    message = refused_step(tiny_models.llama(), batch, tmp_path, max_tokens_per_micro_batch=budget)
    assert "It comes from sample 0 of prompt row 1." in message


def test_an_infinite_advantage_stops_the_step(tmp_path):
    message = refused_step(tiny_models.llama(), planted("advantages", math.inf, masked=False), tmp_path)
    assert "sample 0 of prompt row 1." in message


def test_many_guilty_sequences_are_counted_not_listed():
    batch = make_batch(*[([3], [4])] * 8, advantages=[math.nan] * 7 + [1.0])
    model = tiny_models.llama()
    with pytest.raises(GuardError, match=r"row 4 and 2 more\."):
        make_trainer(model).step(batch, make_objective())


class InfiniteSlope:
    """A finite loss whose gradient is not: sqrt at 0, on the tokens whose advantage is 7."""

    uses_reference = False
    uses_entropy = measures_entropy = False
    temperature = 1.0

    def loss(self, tokens):
        loss, bad = -tokens.logprobs.clone(), tokens.advantages == 7
        loss[bad] = (tokens.logprobs - tokens.logprobs.detach())[bad].sqrt()
        return loss, {}


@pytest.mark.parametrize("budget", [1, 1000])
def test_a_gradient_that_is_not_finite_stops_the_step_and_names_its_sequence(budget, tmp_path):
    batch = make_batch(*ROWS, advantages=[1.0, 1.0, 7.0])
    message = refused_step(
        tiny_models.llama(), batch, tmp_path, objective=InfiniteSlope(), max_tokens_per_micro_batch=budget
    )
    assert "It comes from sample 0 of prompt row 2." in message


def test_a_broken_weight_blames_every_sequence():
    model = tiny_models.llama()
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    with pytest.raises(GuardError) as error:
        make_trainer(model).step(full_batch(), make_objective())
    assert all(f"sample 0 of prompt row {row}" in str(error.value) for row in range(3))


# ---- the gap between engine and trainer ------------------------------------------------------------------------------


def agreeing_batch(model, *, gap=0.0):
    """A batch whose rollout_logprobs are the trainer's own, moved by `gap` on every token."""
    batch = make_batch(*ROWS, advantages=[1.0, -0.5, 0.25])
    own = make_trainer(model).logprobs(batch)
    return replace(batch, rollout_logprobs=own - gap)


def test_a_gap_above_its_bound_stops_the_step(tmp_path):
    model = tiny_models.llama()
    trainer = make_trainer(model, lr=0.01, max_logprob_gap=0.01)
    weights, state = parameters(model), saved_state(trainer, tmp_path / "before")
    with pytest.raises(GuardError, match=r"differ by 0\.02 nats per token on average \(bound 0\.01"):
        trainer.step(agreeing_batch(model, gap=0.02), make_objective())
    assert trainer.num_steps == 0
    assert same_tensors(weights, parameters(model))
    assert saved_state(trainer, tmp_path / "after") == state


def test_nothing_of_a_step_refused_for_its_gap_reaches_the_next_one():
    refused, fresh = tiny_models.llama(), tiny_models.llama()
    good = agreeing_batch(fresh)
    trainer = make_trainer(refused, lr=0.01, max_logprob_gap=0.01)
    with pytest.raises(GuardError):
        trainer.step(agreeing_batch(refused, gap=0.02), make_objective())
    trainer.step(good, make_objective())
    make_trainer(fresh, lr=0.01).step(good, make_objective())
    assert same_tensors(parameters(refused), parameters(fresh))


def test_a_gap_below_its_bound_is_measured_and_passes():
    model = tiny_models.llama()
    metrics = make_trainer(model, max_logprob_gap=0.03).step(agreeing_batch(model, gap=0.02), make_objective())
    assert metrics["logprob_gap"].value == pytest.approx(0.02, abs=1e-5)
    assert metrics["logprob_gap_max"].value == pytest.approx(0.02, abs=1e-5)


def test_the_gap_is_the_mean_over_the_step_not_over_a_micro_batch():
    # one sequence of 1 token is off by .06, five others agree: .06 / 6 = .01 on average
    model = tiny_models.llama()
    batch = agreeing_batch(model)
    batch.rollout_logprobs[-1] += 0.06
    trainer = make_trainer(model, max_logprob_gap=0.02, max_tokens_per_micro_batch=1)
    assert trainer.step(batch, make_objective())["logprob_gap"].value == pytest.approx(0.01, abs=1e-5)


@pytest.mark.parametrize("bound", [0.01, math.inf])
def test_a_gap_that_is_nan_passes_no_bound(bound):
    model = tiny_models.llama()
    batch = agreeing_batch(model)
    batch.rollout_logprobs[6] = math.nan
    with pytest.raises(GuardError):
        make_trainer(model, max_logprob_gap=bound).step(batch, make_objective())


# ---- gradient norm ---------------------------------------------------------------------------------------------------


def test_max_grad_norm_scales_the_gradient_down_to_it():
    # slope of the one token's loss: -[-.1, -.6, .7], norm sqrt(.01 + .36 + .49) = .927362
    model = tiny_models.bigram()
    with seen_gradients(model) as gradients:
        metrics = make_trainer(model, max_grad_norm=0.5).step(make_batch(([1], [2])), make_objective())
    assert metrics["grad_norm"].value == pytest.approx(0.927362, abs=1e-5)  # before it is cut
    assert gradients["table"].norm().item() == pytest.approx(0.5, abs=1e-5)
    assert gradients["table"][1, 2].item() == pytest.approx(-0.7 * 0.5 / 0.927362, abs=1e-5)


def test_max_grad_norm_inf_means_never():
    # as the option's description says; an advantage of a million makes a gradient of a million times .927362
    model = tiny_models.bigram()
    with seen_gradients(model) as gradients:
        make_trainer(model, max_grad_norm=math.inf).step(make_batch(([1], [2]), advantages=[1e6]), make_objective())
    assert gradients["table"].norm().item() == pytest.approx(927362, rel=1e-5)


def test_a_gradient_below_max_grad_norm_stays():
    model = tiny_models.bigram()
    with seen_gradients(model) as gradients:
        make_trainer(model, max_grad_norm=1.0).step(make_batch(([1], [2])), make_objective())
    assert gradients["table"][1].tolist() == pytest.approx([0.1, 0.6, -0.7], abs=1e-6)


def test_the_norm_is_of_the_whole_step_not_of_a_micro_batch():
    rows = random_rows(5, vocab=tiny_models.VOCAB)
    norms = []
    for budget in (1, 1000):
        trainer = make_trainer(tiny_models.llama(), max_grad_norm=0.1, max_tokens_per_micro_batch=budget)
        norms.append(trainer.step(make_batch(*rows), make_objective())["grad_norm"].value)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
