"""The critic through its real step: where a value is read, what moves it, and that the cut does not matter."""

import math
from dataclasses import replace

import pytest
import tiny_models
import torch
from made_batches import (
    make_batch,
    make_critic,
    masters,
    parameters,
    random_rows,
    same_tensors,
    saved_state,
    seen_gradients,
)

from strop.types import GuardError, ModelError

ROWS = random_rows(7, vocab=tiny_models.VOCAB)
RELATIVE = (
    1e-5  # float32: sums of some dozens of terms in another order; relative to the largest entry of each gradient
)


def batch_of(*rows, old_values=0.0, returns=1.0, **options):
    """Rows with one old value and one return for all of their tokens."""
    batch = make_batch(*(rows or ROWS), **options)
    full = torch.full(batch.tokens.shape, 0.0)
    return replace(batch, old_values=full + old_values, returns=full + returns)


def uneven_batch(reduction="token_mean"):
    generator = torch.Generator().manual_seed(5)
    batch = batch_of(reduction=reduction)
    numbers = (torch.randn(batch.tokens.shape, generator=generator) for _ in range(2))
    return replace(batch, **dict(zip(("old_values", "returns"), numbers, strict=True)))


def awake(critic, seed=1):
    """A head that says something of every state."""
    with torch.no_grad():
        critic.model.head.weight.copy_(0.3 * torch.randn(1, 16, generator=torch.Generator().manual_seed(seed)))
        critic.model.head.bias.fill_(0.2)
    return critic


# ---- where a value is read ------------------------------------------------------------------------------------------


@torch.no_grad()
def values_alone(critic, prompt, response):
    """Value of each response token: the head on the last hidden state of the tokens before it, and of nothing else."""
    tokens, found = [*prompt, *response], []
    for place in range(len(prompt), len(tokens)):
        hidden = critic.model.body(torch.tensor([tokens[:place]])).last_hidden_state[0, -1]
        found.append(float(hidden @ critic.model.head.weight[0] + critic.model.head.bias[0]))
    return found


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("budget", [1, 20, 10_000])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_the_value_of_a_token_is_that_of_the_tokens_before_it(name, layout, budget):
    critic = awake(make_critic(tiny_models.BUILDERS[name](), layout=layout, max_tokens_per_micro_batch=budget))
    batch = batch_of()
    found = critic.values(batch)
    wanted = [value for prompt, response in ROWS for value in values_alone(critic, prompt, response)]
    assert found[batch.loss_mask].tolist() == pytest.approx(wanted, abs=1e-5)
    assert not found[~batch.loss_mask].any()
    assert max(wanted) - min(wanted) > 0.1  # else every place would do


def test_a_new_critic_says_0_of_everything():
    assert not make_critic(tiny_models.llama()).values(batch_of()).any()


def test_the_critic_is_a_copy_and_the_policy_stays_as_it_is():
    policy = tiny_models.llama()
    before, critic = parameters(policy), make_critic(policy, lr=0.1)
    critic.step(batch_of())
    critic.step(batch_of())
    assert same_tensors(parameters(policy), before)
    assert not torch.equal(critic.model.body.norm.weight, policy.model.norm.weight)


# ---- its step -------------------------------------------------------------------------------------------------------


def test_the_first_loss_is_half_the_mean_squared_return():
    # a new critic says 0; returns 1 and 3 on one token each: (1 + 9) / 2 / 2 = 2.5
    batch = make_batch(([3], [4]), ([5], [6]))
    returns = torch.tensor([0.0, 1.0, 0.0, 3.0])
    metrics = make_critic(tiny_models.llama()).step(replace(batch, old_values=torch.zeros(4), returns=returns))
    assert metrics["value_loss"].value == pytest.approx(2.5, abs=1e-6)
    assert metrics["value_clip_fraction"].value == 0.0


def test_a_value_that_has_moved_too_far_is_clipped_and_has_no_gradient():
    # V = 0, old -1, clip .2, return 3: held at -.8: 3.8^2 / 2 = 7.22 is larger than 9 / 2
    model = make_critic(tiny_models.llama(), eps_clip_value=0.2)
    before = parameters(model.model)
    metrics = model.step(batch_of(([3], [4]), old_values=-1.0, returns=3.0))
    assert metrics["value_loss"].value == pytest.approx(7.22, abs=1e-5)
    assert metrics["value_clip_fraction"].value == 1.0
    assert metrics["critic_grad_norm"].value == 0.0
    assert same_tensors(parameters(model.model), before)
    unclipped = make_critic(tiny_models.llama(), eps_clip_value=None)
    metrics = unclipped.step(batch_of(([3], [4]), old_values=-1.0, returns=3.0))
    assert metrics["value_loss"].value == pytest.approx(4.5, abs=1e-5)


def test_the_learning_rate_is_the_critics_own_and_follows_its_schedule():
    critic = make_critic(tiny_models.llama(), lr=0.4, lr_schedule="linear", total_steps=4)
    rates = [critic.step(batch_of())["critic_lr"].value for _ in range(4)]
    assert rates == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert critic.num_steps == 4


def test_a_step_without_trainable_tokens_is_no_step():
    # case 18: weight decay alone would move the weights
    critic = make_critic(tiny_models.llama(), lr=0.1, weight_decay=0.1)
    before = parameters(critic.model)
    assert critic.step(batch_of(([1, 2], []))) == {}
    assert critic.num_steps == 0
    assert same_tensors(parameters(critic.model), before)


def step_of(batch, *, order=None, **options):
    critic = awake(make_critic(tiny_models.llama(), **options))
    with seen_gradients(critic.model) as gradients:
        metrics = critic.step(batch.select(order) if order else batch)
    return {name: metric.value for name, metric in metrics.items()}, gradients


def assert_same(found, wanted):
    assert found[0] == pytest.approx(wanted[0], rel=2e-5, abs=1e-6)
    for name, gradient in wanted[1].items():
        assert (found[1][name] - gradient).abs().max() <= RELATIVE * gradient.abs().max(), name


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("budget", [1, 20, 10_000])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_micro_batches_and_layouts_do_not_change_a_step(layout, budget, reduction):
    batch = uneven_batch(reduction)
    assert_same(step_of(batch, layout=layout, max_tokens_per_micro_batch=budget), step_of(batch))


def test_the_order_of_sequences_does_not_change_a_step():
    batch = uneven_batch()
    assert_same(step_of(batch, order=[3, 0, 6, 1, 5, 2, 4]), step_of(batch))


def test_the_loss_is_averaged_as_the_policys_is():
    # returns 2 on one token, 1 on three: token_mean (4 + 1 + 1 + 1) / 2 / 4 = .875, sequence_mean (4 + 1) / 2 / 2 = 1.25
    for reduction, wanted in (("token_mean", 0.875), ("sequence_mean", 1.25)):
        batch = batch_of(([3], [4]), ([5], [6, 7, 8]), reduction=reduction)
        batch.returns[1] = 2.0
        assert make_critic(tiny_models.llama()).step(batch)["value_loss"].value == pytest.approx(wanted, abs=1e-6)


# ---- guards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["old_values", "returns"])
def test_what_stands_at_tokens_that_are_not_trainable_does_not_matter(field):
    batch = uneven_batch()
    spoiled = torch.where(batch.loss_mask, getattr(batch, field), math.nan)
    assert_same(step_of(replace(batch, **{field: spoiled})), step_of(batch))


@pytest.mark.parametrize("budget", [1, 10_000])
def test_a_return_that_is_not_finite_stops_the_step_and_names_the_critic_and_the_sequence(budget, tmp_path):
    critic = make_critic(tiny_models.llama(), max_tokens_per_micro_batch=budget)
    before = saved_state(critic, tmp_path / "before")
    batch = batch_of(([3], [4]), ([5], [6]))
    batch.returns[3] = math.nan
    with pytest.raises(GuardError, match=r"the critic's loss .* not made\. It comes from sample 0 of prompt row 1\."):
        critic.step(batch)
    assert saved_state(critic, tmp_path / "after") == before


def test_a_model_that_packed_sequences_see_through_is_refused():
    with pytest.raises(ValueError, match=r"trainer\.layout must be padded or auto for OPTModel, got packed"):
        make_critic(tiny_models.opt(), layout="packed")


def test_a_model_without_a_body_is_refused_with_what_to_do():
    with pytest.raises(ModelError, match=r"Bigram is not made of a body and a head.* set critic\.path"):
        make_critic(tiny_models.bigram())


# ---- narrow types, state --------------------------------------------------------------------------------------------


def test_a_bfloat16_body_learns_by_float32_masters_and_its_head_is_float32():
    critic = make_critic(tiny_models.llama().bfloat16(), lr=1e-5)
    assert critic.model.head.weight.dtype == torch.float32
    weight = critic.model.body.norm.weight
    before = weight.clone()
    for _ in range(2):  # the first step moves the head alone, which was 0
        critic.step(batch_of())
    master = masters(critic)["body.norm.weight"]
    assert torch.equal(weight, before)  # a step this small rounds away
    assert master.dtype == torch.float32
    assert not torch.equal(master, before.float())


def test_a_critic_that_is_loaded_goes_on_bit_for_bit(tmp_path):
    options = {"lr": 0.01, "weight_decay": 0.1, "lr_schedule": "cosine", "warmup_steps": 2, "total_steps": 6}
    straight, first, second = (make_critic(tiny_models.llama(seed), **options) for seed in (0, 0, 5))
    batches = [uneven_batch() for _ in range(6)]
    losses = [straight.step(batch)["value_loss"].value for batch in batches]
    begun = [first.step(batch)["value_loss"].value for batch in batches[:3]]
    state = saved_state(first, tmp_path / "saved")
    assert sorted(state) == ["critic_optimizer.safetensors", "critic_trainer.json", "critic_weights.safetensors"]
    second.load(tmp_path / "saved")
    assert second.num_steps == 3
    assert begun + [second.step(batch)["value_loss"].value for batch in batches[3:]] == losses
    assert saved_state(straight, tmp_path / "a") == saved_state(second, tmp_path / "b")
