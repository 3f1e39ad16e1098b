"""bfloat16 weights learn by float32 masters; float32 weights have none."""

import math

import pytest
import tiny_models
import torch
from made_batches import (
    make_batch,
    make_objective,
    make_trainer,
    masters,
    parameters,
    random_rows,
    same_tensors,
    saved_state,
)

from strop.types import GuardError

BATCH = make_batch(*random_rows(3, vocab=tiny_models.VOCAB), advantages=[1.0, -1.0] * 3 + [0.5])
# The trained weights lie at 1, where bfloat16 goes in steps of 1/256 (below) and 1/128 (above): 1e-3 is below half of
# either. AdamW's first steps are all but lr x sign(gradient).
LR, STEPS = 1e-3, 20


def ones(dtype):
    """A bigram model: all logits 1."""
    model = tiny_models.bigram([[1 / 3] * 3] * 3)
    with torch.no_grad():
        model.table.fill_(1.0)
    return model.to(dtype)


def stepped(model, **options):
    trainer = make_trainer(model, lr=LR, **options)
    batch = make_batch(([0], [1, 2, 2, 0, 1]), ([2], [1, 1]), advantages=[1.0, -0.5])
    for _ in range(STEPS):
        trainer.step(batch, make_objective())
    return trainer


def test_steps_too_small_for_bfloat16_add_up_to_where_float32_training_ends():
    narrow, wide = ones(torch.bfloat16), ones(torch.float32)
    stepped(narrow)
    stepped(wide)
    moved = (wide.table - 1).abs()
    assert moved.max() > 0.015  # 20 steps of 1e-3
    # half a step of bfloat16 around 1 (1/256), and 1e-3 for gradients that were rounded on their way
    assert (narrow.table.float() - wide.table).abs().max() < 1 / 256 + 1e-3


def test_adamw_on_bfloat16_weights_themselves_would_not_have_moved():
    # why there are masters
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([parameter], lr=LR, weight_decay=0.0)
    for _ in range(STEPS):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert (parameter == 1).all()


def test_weights_are_the_masters_rounded():
    trainer = make_trainer(tiny_models.llama().bfloat16(), lr=1e-3)
    trainer.step(BATCH, make_objective())
    for name, master in masters(trainer).items():
        assert master.dtype == torch.float32
        assert torch.equal(trainer.model.get_parameter(name), master.bfloat16())


def test_gradients_of_many_micro_batches_are_summed_in_float32():
    # 600 micro-batches of one token with the same gradient: a bfloat16 sum stops growing at 256 times its parts
    rows = [([0], [1])] * 600
    norms = []
    for dtype in (torch.bfloat16, torch.float32):
        trainer = make_trainer(ones(dtype), lr=LR, max_tokens_per_micro_batch=2)
        norms.append(trainer.step(make_batch(*rows), make_objective())["grad_norm"].value)
    assert norms[0] == pytest.approx(norms[1], rel=0.01)


@pytest.mark.parametrize("build", [tiny_models.llama, tiny_models.tied_llama])
def test_a_resumed_bfloat16_run_goes_on_bit_for_bit(build, tmp_path):
    straight, first = (make_trainer(build().bfloat16(), lr=1e-4) for _ in range(2))
    for _ in range(4):
        straight.step(BATCH, make_objective())
    for _ in range(2):
        first.step(BATCH, make_objective())
    first.save(tmp_path)
    second = make_trainer(build(5).bfloat16(), lr=1e-4)
    second.load(tmp_path)
    assert same_tensors(parameters(first.model), parameters(second.model))
    for _ in range(2):
        second.step(BATCH, make_objective())
    assert same_tensors(parameters(straight.model), parameters(second.model))
    assert saved_state(straight, tmp_path / "a") == saved_state(second, tmp_path / "b")


def test_a_bfloat16_batch_that_is_taken_back_leaves_no_trace():
    trainer = make_trainer(tiny_models.llama().bfloat16(), lr=1e-4)
    trainer.step(BATCH, make_objective())
    weights, before = parameters(trainer.model), masters(trainer)
    trainer.remember(moments=False)
    for _ in range(3):
        trainer.step(BATCH, make_objective())
    assert not same_tensors(before, masters(trainer))
    trainer.go_back()
    assert same_tensors(weights, parameters(trainer.model))
    assert same_tensors(before, masters(trainer))


def test_a_bfloat16_step_that_a_guard_refuses_leaves_weights_masters_and_no_gradient():
    trainer = make_trainer(tiny_models.llama().bfloat16(), lr=0.01)
    weights, before = parameters(trainer.model), masters(trainer)
    rows = random_rows(3, vocab=tiny_models.VOCAB)
    broken = make_batch(*rows, advantages=[1.0] * (len(rows) - 1) + [math.inf])
    with pytest.raises(GuardError, match=f"sample 0 of prompt row {len(rows) - 1}"):
        trainer.step(broken, make_objective())
    assert same_tensors(weights, parameters(trainer.model))
    assert same_tensors(before, masters(trainer))
    # what the refused step had summed up does not enter the next one
    other = make_trainer(tiny_models.llama().bfloat16(), lr=0.01)
    assert trainer.step(BATCH, make_objective()) == other.step(BATCH, make_objective())
    assert same_tensors(parameters(other.model), parameters(trainer.model))


def test_tied_bfloat16_weights_have_one_master_and_stay_tied():
    model = tiny_models.tied_llama().bfloat16()
    trainer = make_trainer(model, lr=0.01)
    trainer.step(BATCH, make_objective())
    assert "lm_head.weight" not in masters(trainer)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_a_float32_model_is_its_own_master():
    model = tiny_models.llama()
    trainer = make_trainer(model)
    moved = [p for group in trainer._updates.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in moved} == {id(p) for p in model.parameters()}
