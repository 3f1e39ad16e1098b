"""Loss, gradient and metrics do not depend on micro-batch size, layout, or the order of the sequences."""

from dataclasses import replace

import pytest
import tiny_models
import torch
from made_batches import make_batch, make_objective, make_trainer, parameters, random_rows, seen_gradients

MODELS = ["llama", "qwen2", "gpt2", "gemma2"]
# float32: sums of some dozens of terms in another order; relative to the largest entry of each gradient
RELATIVE = 1e-5
ALGORITHM = {
    "policy_loss": {"kind": "ppo_clip", "eps_clip": 0.2, "eps_clip_c": 3.0},
    "kl": {"coef": 0.1},
    "entropy_coef": 0.01,
}


def batch_of(model, reduction):
    """Seven sequences of 2 to 13 tokens, ratios on both sides of the band, a reference nearby."""
    generator = torch.Generator().manual_seed(11)
    advantages = torch.randn(7, generator=generator).tolist()
    limit = 9 if reduction == "constant_length" else None
    rows = random_rows(7, vocab=tiny_models.VOCAB)
    batch = make_batch(*rows, advantages=advantages, reduction=reduction, max_response_tokens=limit)
    current = make_trainer(model).logprobs(batch)

    def near(width):
        return current + width * torch.randn(current.shape, generator=generator)

    return replace(batch, old_logprobs=near(0.5), rollout_logprobs=near(0.01), ref_logprobs=near(0.5))


def run(name, *, order=None, reduction="token_mean", **options):
    """Metrics and gradients of one real step."""
    model = tiny_models.BUILDERS[name]()
    batch = batch_of(model, reduction)
    with seen_gradients(model) as gradients:
        objective = make_objective(**ALGORITHM, temperature=0.7)
        metrics = make_trainer(model, **options).step(batch.select(order) if order else batch, objective)
    return {n: m.value for n, m in metrics.items() if n != "padding_share"}, gradients


def assert_same(found, wanted):
    assert found[0] == pytest.approx(wanted[0], rel=2e-5, abs=1e-6)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        difference = (found[1][name] - gradient).abs().max()
        assert difference <= RELATIVE * gradient.abs().max(), name


@pytest.fixture(scope="module")
def whole():
    """One micro-batch, padded, in the order of the batch."""
    return {name: run(name, max_tokens_per_micro_batch=10_000) for name in MODELS}


@pytest.mark.parametrize("layout", ["padded", "packed", "auto"])
@pytest.mark.parametrize("budget", [1, 13, 20, 40, 10_000])
@pytest.mark.parametrize("name", MODELS)
def test_the_size_of_micro_batches_and_the_layout_do_not_matter(name, budget, layout, whole):
    assert_same(run(name, max_tokens_per_micro_batch=budget, layout=layout), whole[name])


@pytest.mark.parametrize("order", [(6, 5, 4, 3, 2, 1, 0), (3, 0, 6, 2, 5, 1, 4)])
@pytest.mark.parametrize("name", MODELS)
def test_the_order_of_sequences_does_not_matter(name, order, whole):
    for layout in ("padded", "packed"):
        assert_same(run(name, order=order, max_tokens_per_micro_batch=20, layout=layout), whole[name])


@pytest.mark.parametrize("reduction", ["sequence_mean", "prompt_mean", "constant_length"])
def test_it_holds_for_every_reduction(reduction):
    wanted = run("llama", reduction=reduction, max_tokens_per_micro_batch=10_000)
    for budget in (1, 20):
        found = run("llama", reduction=reduction, max_tokens_per_micro_batch=budget, layout="packed")
        assert_same(found, wanted)


def test_gradients_of_micro_batches_are_summed():
    # the sum of what each sequence alone gives, with its weights in the whole, is what the step gives
    model = tiny_models.llama()
    batch = batch_of(model, "token_mean")
    total = {}
    for sequence in range(batch.num_sequences):
        model = tiny_models.llama()
        with seen_gradients(model) as gradients:
            make_trainer(model).step(batch.select([sequence]), make_objective(**ALGORITHM, temperature=0.7))
        total = {n: gradient + total.get(n, 0.0) for n, gradient in gradients.items()}
    assert_same(({}, total), ({}, run("llama", max_tokens_per_micro_batch=1)[1]))


def test_weights_end_at_the_same_place_after_several_steps():
    # AdamW divides by the gradient's size, so entries whose gradient is all rounding may differ by the rate: adam_eps
    # is raised above rounding.
    ends = []
    for options in ({"max_tokens_per_micro_batch": 1}, {"max_tokens_per_micro_batch": 10_000, "layout": "packed"}):
        model = tiny_models.llama()
        batch = batch_of(model, "token_mean")
        trainer = make_trainer(model, lr=0.01, adam_eps=1e-3, **options)
        for _ in range(4):
            trainer.step(batch, make_objective(**ALGORITHM, temperature=0.7))
        ends.append(parameters(model))
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_do_not_depend_on_the_cut(name):
    model = tiny_models.BUILDERS[name]()
    batch = batch_of(model, "token_mean")
    wanted = make_trainer(model).logprobs(batch, temperature=0.7)
    assert (wanted[~batch.loss_mask] == 0).all()
    for budget in (1, 20):
        for layout in ("padded", "packed"):
            trainer = make_trainer(model, max_tokens_per_micro_batch=budget, layout=layout)
            torch.testing.assert_close(trainer.logprobs(batch, temperature=0.7), wanted, rtol=1e-5, atol=1e-5)
