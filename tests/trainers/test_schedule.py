"""The learning rate counts optimizer steps, in the function and in the trainer's real steps."""

import pytest
import tiny_models
from made_batches import make_batch, make_objective, make_trainer, parameters, same_tensors

from strop.trainers import lr_factor

BATCH = make_batch(([0], [1]), ([1], [2, 0]))


def rates(num_steps, **options):
    """The rate of each of so many real steps."""
    trainer = make_trainer(tiny_models.bigram(), **options)
    return [trainer.step(BATCH, make_objective())["lr"].value for _ in range(num_steps)]


def test_linear_is_halfway_after_half_of_the_optimizer_steps():
    # case 4: 10 batches x 2 updates = 20 optimizer steps, 1 to 0: update k (from 0) has 1 - k / 20
    found = rates(21, lr=1.0, lr_schedule="linear", total_steps=20)
    assert found[0] == 1.0
    assert found[5] == pytest.approx(0.75)
    assert found[10] == pytest.approx(0.5)
    assert found[19] == pytest.approx(0.05)
    assert found[20] == 0.0


def test_at_rate_zero_nothing_moves():
    model = tiny_models.bigram()
    trainer = make_trainer(model, lr=1.0, weight_decay=0.5, lr_schedule="linear", total_steps=2)
    for _ in range(2):
        trainer.step(BATCH, make_objective())
    before = parameters(model)
    trainer.step(BATCH, make_objective())
    assert same_tensors(before, parameters(model))


def test_warmup_rises_linearly_and_its_first_step_moves():
    # 4 warm-up steps to a peak of 2: 1/4, 2/4, 3/4, 4/4 of it; then linear over the 8 that are left: 1, 7/8, 6/8
    found = rates(7, lr=2.0, warmup_steps=4, lr_schedule="linear", total_steps=12)
    assert found == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 1.75, 1.5])


def test_constant_stays_after_the_warmup():
    assert rates(5, lr=0.5, warmup_steps=2, total_steps=4) == pytest.approx([0.25, 0.5, 0.5, 0.5, 0.5])


@pytest.mark.parametrize("step, factor", [(0, 1.0), (5, 0.8535534), (10, 0.5), (15, 0.1464466), (20, 0.0), (30, 0.0)])
def test_cosine_by_hand(step, factor):
    # (1 + cos(pi / 4)) / 2 = (1 + .7071068) / 2 = .8535534
    found = lr_factor(step, total_steps=20, warmup_steps=0, schedule="cosine")
    assert found == pytest.approx(factor, abs=1e-7)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_never_rises_after_its_warmup_and_ends_at_zero(schedule):
    found = [lr_factor(k, total_steps=17, warmup_steps=3, schedule=schedule) for k in range(3, 18)]
    assert found == sorted(found, reverse=True)
    assert found[0] == 1.0
    assert found[-1] == pytest.approx(0.0, abs=1e-12)


def test_the_rate_scales_the_step():
    # AdamW's first step is lr x sign of the gradient where adam_eps is small: 0.25 per moved logit of row 1 and row 0
    model = tiny_models.bigram()
    before = parameters(model)["table"]
    make_trainer(model, lr=0.25, adam_eps=1e-12).step(make_batch(([1], [2])), make_objective())
    moved = parameters(model)["table"] - before
    assert moved[1].tolist() == pytest.approx([-0.25, -0.25, 0.25], abs=1e-6)
    assert moved[0].tolist() == [0.0, 0.0, 0.0]


def test_weight_decay_shrinks_matrices_and_leaves_vectors():
    # no gradient (advantage 0), decay .1 at rate .5: matrices x .95, norms stay
    model = tiny_models.llama()
    before = parameters(model)
    make_trainer(model, lr=0.5, weight_decay=0.1).step(make_batch(([1], [2]), advantages=[0.0]), make_objective())
    for name, value in parameters(model).items():
        factor = 0.95 if value.dim() >= 2 else 1.0
        assert value.flatten().tolist() == pytest.approx((before[name] * factor).flatten().tolist(), abs=1e-7), name
