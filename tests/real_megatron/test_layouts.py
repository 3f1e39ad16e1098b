"""Megatron-Core over several processes, divided in every way that runs here, against the trainer torch in one."""

from dataclasses import replace
from functools import partial

import pytest
import tiny_models
import torch
from real_megatron.equal_trainers import batch_of, bits, check_comes_back, check_gradients, check_steps, opened, steps
from trainers.made_batches import same_tensors, saved_state
from trainers.test_several_processes import check_same_weights, objective_of

from strop.types import GuardError

LAYOUTS = {
    "layers": {"num_processes": 2, "tensor_parallel": 2},
    "stages": {"num_processes": 2, "pipeline_parallel": 2},
    "shares": {"num_processes": 2},
    "three": {"num_processes": 3},
    "whole_optimizers": {"num_processes": 2, "distributed_optimizer": False},
    "layers_and_stages": {"num_processes": 4, "tensor_parallel": 2, "pipeline_parallel": 2},
    "layers_and_shares": {"num_processes": 4, "tensor_parallel": 2},
    "stages_and_shares": {"num_processes": 4, "pipeline_parallel": 2},
}
of_all_models = pytest.mark.parametrize("name", ["llama", "tied_llama", "qwen2", "qwen3"])


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS)
def pairs(request):
    with opened(request.param) as found:
        yield found


@of_all_models
def test_five_steps_are_those_of_the_trainer_torch(pairs, name):
    check_steps(*pairs.both(getattr(tiny_models, name)))


@of_all_models
def test_gradients_are_those_of_the_trainer_torch(pairs, name, tmp_path):
    check_gradients(*pairs.both(getattr(tiny_models, name), max_grad_norm=1e9), tmp_path)


@of_all_models
def test_weights_come_back_bit_for_bit(pairs, name):
    check_comes_back(pairs, getattr(tiny_models, name))


def test_layers_that_keep_their_inputs_alone_learn_the_same(pairs):
    check_steps(*pairs.both(tiny_models.qwen3, activation_checkpointing=True), num_steps=2)


def test_a_padding_token_gets_no_gradient_where_it_is_read(pairs):
    check_steps(*pairs.both(partial(tiny_models.llama, pad_token_id=30, tie_word_embeddings=True)), num_steps=2)


def test_ranks_without_a_sequence_wait_for_the_others(pairs):
    one, many = pairs.both(tiny_models.llama)
    objective = objective_of()
    batch = batch_of(0, objective).select([0])
    assert many.step(batch, objective)["loss"].value == pytest.approx(
        one.step(batch, objective)["loss"].value, rel=1e-5
    )
    check_same_weights(one, many)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_checkpoint_goes_on_to_the_bit(pairs, dtype, tmp_path):
    def build():
        return tiny_models.tied_llama().to(dtype)

    many = pairs.megatron(build, keeps_reference=True)
    steps(many, 0, 2)
    saved = saved_state(many, tmp_path / "saved")
    steps(many, 2, 4)
    after = saved_state(many, tmp_path / "after")
    again = pairs.megatron(build, keeps_reference=True)
    again.load(tmp_path / "saved")
    assert saved_state(again, tmp_path / "again") == saved
    steps(again, 2, 4)
    assert saved_state(again, tmp_path / "again_after") == after
    again.publish()
    many.publish()
    assert same_tensors(bits(again.model), bits(many.model))


def test_what_is_remembered_is_gone_back_to_to_the_bit(pairs):
    many = pairs.megatron(tiny_models.llama)
    steps(many, 0, 1)
    many.remember(moments=True)
    before = many.digest()
    steps(many, 1, 3)
    after = many.digest()
    many.go_back()
    assert (many.digest(), many.num_steps) == (before, 1)
    steps(many, 1, 3)
    assert many.digest() == after


def test_a_checkpoint_goes_on_in_the_other_trainer(pairs, tmp_path):
    one, many = pairs.both(tiny_models.qwen2)
    steps(many, 0, 2)
    saved_state(many, tmp_path / "theirs")
    one.load(tmp_path / "theirs")
    steps(one, 2, 3)
    saved_state(one, tmp_path / "ours")
    many.load(tmp_path / "ours")
    for trainer in (one, many):
        steps(trainer, 3, 4)
    check_same_weights(one, many)


def test_a_loss_that_is_not_finite_names_its_sequence_and_moves_nothing(pairs):
    many, objective = pairs.megatron(tiny_models.llama), objective_of()
    batch, before = batch_of(0, objective), many.digest()
    spoilt = torch.where(batch.sequence_ids == 2, torch.nan, batch.advantages)
    with pytest.raises(GuardError, match=r"comes from sample 0 of prompt row 2\.$"):
        many.step(replace(batch, advantages=spoilt), objective)
    assert (many.digest(), many.num_steps) == (before, 0)
    many.step(batch, objective)  # the ranks are still in step
