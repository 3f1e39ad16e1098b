"""Megatron-Core in one process: what `make test` runs of it, in a process of its own."""

from dataclasses import replace

import pytest
import tiny_models
import torch
from real_megatron.equal_trainers import (
    batch_of,
    check_comes_back,
    check_gradients,
    check_logprobs,
    check_steps,
    opened,
    steps,
)
from trainers.test_several_processes import objective_of, rows

from strop.types import GuardError, UserError


@pytest.fixture(scope="module")
def pairs():
    with opened({}) as found:
        yield found


@pytest.mark.parametrize("name", ["llama", "tied_llama", "qwen2", "qwen3"])
def test_steps_are_those_of_the_trainer_torch(pairs, name):
    one, many = pairs.both(getattr(tiny_models, name), keeps_reference=True)
    check_steps(one, many)
    check_logprobs(one, many, model="reference")


def test_gradients_are_those_of_the_trainer_torch(pairs, tmp_path):
    check_gradients(*pairs.both(tiny_models.qwen2, max_grad_norm=1e9), tmp_path)


def test_weights_come_back_bit_for_bit(pairs):
    check_comes_back(pairs, tiny_models.qwen2)


def test_a_guard_stops_a_step_before_anything_moves(pairs):
    def refuse(metrics):
        raise GuardError("enough", guard="grad_norm")

    many, objective = pairs.megatron(tiny_models.llama, here={"watch": refuse}), objective_of()
    before, batch = many.digest(), batch_of(0, objective)
    with pytest.raises(GuardError, match="enough"):
        many.step(batch, objective)
    many.max_logprob_gap = 0.01
    with pytest.raises(GuardError, match="engine and trainer differ by"):
        many.step(replace(batch, measures_gap=True), objective)
    assert (many.digest(), many.num_steps) == (before, 0)


def test_a_reference_becomes_the_policy_when_it_is_refreshed(pairs):
    many = pairs.megatron(tiny_models.llama, keeps_reference=True)
    first = many.logprobs(rows(), model="reference")
    steps(many, 0, 2)
    assert torch.equal(many.logprobs(rows(), model="reference"), first)
    many.refresh_reference()
    assert torch.equal(many.logprobs(rows(), model="reference"), many.logprobs(rows()))
    assert not torch.equal(many.logprobs(rows()), first)


def test_a_network_that_does_not_compute_what_the_model_does_is_refused(pairs):
    def build():
        model = tiny_models.llama()
        model.model.layers[0].self_attn.scaling *= 2  # not as its config says
        return model

    with pytest.raises(UserError, match="made of Megatron-Core's layers it does not compute the same"):
        pairs.megatron(build)
