"""A step's loss is the reduction's mean over the whole step, however the step is cut into micro-batches."""

import contextlib
import types
from dataclasses import replace

import pytest
import tiny_models
import torch
from made_batches import (
    GivenLosses,
    make_batch,
    make_objective,
    make_rollout,
    make_trainer,
    parameters,
    same_tensors,
    saved_state,
    seen_gradients,
    weighted,
)

from strop.config import TrainConfig
from strop.data import build_batch
from strop.runtime.learning import learn, weigh

P, Q = ([0], [1]), ([1], [2, 2, 0])  # case 5: one token of loss 4, three of loss 1
# token_mean (4 + 3) / 4; sequence_mean (4 + 1) / 2; constant_length (4 + 3) / (2 x 8)
REDUCTIONS = [("token_mean", 1.75), ("sequence_mean", 2.5), ("constant_length", 0.4375), ("prompt_mean", 2.5)]


def step_on(batch, **options):
    """Loss and gradient of one step."""
    model = tiny_models.bigram()
    with seen_gradients(model) as gradients:
        metrics = make_trainer(model, **options).step(batch, GivenLosses())
    return metrics["loss"].value, gradients["table"]


def given(reduction, *, order=(0, 1)):
    rows, losses = (P, Q), (4.0, 1.0)
    return make_batch(
        *(rows[i] for i in order),
        advantages=[losses[i] for i in order],
        reduction=reduction,
        max_response_tokens=8 if reduction == "constant_length" else None,
    )


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("budget", [1, 4, 5, 6, 8, 1000])  # P has 2 positions, Q 4: two micro-batches or one
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("reduction, loss", REDUCTIONS)
def test_the_reductions_by_hand_at_any_cut_and_layout(reduction, loss, order, budget, layout):
    batch = given(reduction, order=order)
    found, gradient = step_on(batch, max_tokens_per_micro_batch=budget, layout=layout)
    assert found == pytest.approx(loss, abs=1e-6)
    whole = step_on(given(reduction))[1]
    torch.testing.assert_close(gradient, whole, rtol=1e-5, atol=1e-7)  # float32 sums in another order


@pytest.mark.parametrize("reduction, loss", REDUCTIONS)
def test_parts_of_a_step_add_up_as_ranks_would(reduction, loss):
    batch = given(reduction)
    (loss_p, grad_p), (loss_q, grad_q) = step_on(batch.select([0])), step_on(batch.select([1]))
    assert loss_p + loss_q == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(grad_p + grad_q, step_on(batch)[1], rtol=1e-5, atol=1e-7)


def test_a_sequence_without_trainable_tokens_changes_nothing():
    alone = step_on(given("sequence_mean"))
    beside = make_batch(P, Q, ([2, 1, 0, 0, 1], []), advantages=[4.0, 1.0, 9.0], reduction="sequence_mean")
    for budget in (1, 1000):
        found = step_on(beside, max_tokens_per_micro_batch=budget)
        assert found[0] == pytest.approx(alone[0], abs=1e-6)
        torch.testing.assert_close(found[1], alone[1], rtol=1e-5, atol=1e-7)


def test_the_first_token_of_a_sequence_is_never_trained():
    # a rollout whose mask begins with True: nothing predicts its first token, two trainable tokens are left
    rollout = replace(make_rollout([0], [1, 2]), response_mask=(True, True, True))
    batch = weighted(build_batch([rollout], [3.0]))
    assert batch.loss_mask.tolist() == [False, True, True]
    assert step_on(batch)[0] == pytest.approx(3.0, abs=1e-6)


# ---- truncated responses ---------------------------------------------------------------------------------------------


def session(model, *, mask_truncated):
    """What `weigh` and `learn` need, with a reward that is its own advantage: another response of the group gives 0."""
    config = TrainConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"kind": "jsonl", "path": "d"},
            "reward": {"kind": "exact"},
            "algorithm": {"mask_truncated": mask_truncated},
            "trainer": {"kind": "torch", "lr": 0.1, "weight_decay": 0.1},
        }
    )
    objective, real = GivenLosses(), make_objective(reduction="sequence_mean")
    objective.options, objective.needs_old_logprobs = real.options, False
    objective.advantages_and_returns = lambda scored: (scored.rewards[scored.sequence_ids], None)
    objective.step_tensors, objective.adapt = real.step_tensors, real.adapt
    console = types.SimpleNamespace(phase=lambda *_: contextlib.nullcontext(), advance=lambda _: None)
    trainer = make_trainer(model, lr=0.1, weight_decay=0.1)
    parts = {"config": config, "objective": objective, "trainer": trainer, "critic": None, "teachers": None}
    return types.SimpleNamespace(**parts, console=console, step=0)


def truncated_case(*, x_is_truncated=False):
    """Case 6. X: two tokens of loss 1. Y: six tokens, truncated, of a loss that would show."""
    return [
        make_rollout([0], [1, 2], reward=1.0, finish_reason="length" if x_is_truncated else "stop"),
        make_rollout([0], [1, 2, 1, 1, 0, 2], sample=1, reward=7.0, finish_reason="length"),
    ]


def test_masked_truncated_responses_leave_before_the_weights_are_counted():
    # X alone: 1.0. Weights counted with Y would give 1 / 2 (sequence_mean) or 2 / 8 (token_mean).
    now = session(tiny_models.bigram(), mask_truncated=True)
    metrics = learn(now, weigh(now, truncated_case()))
    assert metrics[0]["loss"].value == pytest.approx(1.0, abs=1e-6)


def test_truncated_responses_stay_where_nobody_masks_them():
    # (1 + 7) / 2
    now = session(tiny_models.bigram(), mask_truncated=False)
    assert learn(now, weigh(now, truncated_case()))[0]["loss"].value == pytest.approx(4.0, abs=1e-6)


def test_a_step_of_masked_truncated_responses_alone_is_no_step(tmp_path):
    now = session(tiny_models.bigram(), mask_truncated=True)
    before = saved_state(now.trainer, tmp_path / "before")
    metrics = learn(now, weigh(now, truncated_case(x_is_truncated=True)))
    assert {name: metric.value for name, metric in metrics[0].items()} == {"skipped_steps": 1.0}
    assert saved_state(now.trainer, tmp_path / "after") == before


# ---- no trainable token (case 18) ------------------------------------------------------------------------------------


def test_a_step_without_a_trainable_token_changes_nothing_and_is_counted(tmp_path):
    # AdamW with weight decay and with moments from an earlier step would move the weights
    model = tiny_models.llama()
    trainer = make_trainer(model, lr=0.01, weight_decay=1.0, lr_schedule="linear", total_steps=10)
    trainer.step(make_batch(([3, 4], [5, 6])), make_objective())
    weights, state = parameters(model), saved_state(trainer, tmp_path / "before")
    metrics = trainer.step(make_batch(([3, 4], []), ([7], [])), make_objective())
    assert metrics["skipped_steps"].value == 1.0
    assert trainer.num_steps == 1
    assert same_tensors(weights, parameters(model))
    assert saved_state(trainer, tmp_path / "after") == state


def test_a_skipped_step_does_not_move_the_schedule():
    trainer = make_trainer(tiny_models.bigram(), lr=1.0, lr_schedule="linear", total_steps=4)
    batch, empty = make_batch(P, Q), make_batch(([0], []))
    rates = [trainer.step(b, make_objective()).get("lr") for b in (batch, empty, batch)]
    assert [rate and rate.value for rate in rates] == [1.0, None, 0.75]


def test_an_empty_batch_is_no_step():
    trainer = make_trainer(tiny_models.bigram())
    assert trainer.step(build_batch([], []), make_objective())["skipped_steps"].value == 1.0
    assert trainer.num_steps == 0
