"""Activation checkpointing: the same gradients, fewer numbers kept, and nothing dropped out."""

import pytest
import tiny_models
import torch
from made_batches import (
    make_batch,
    make_critic,
    make_objective,
    make_trainer,
    random_rows,
    same_tensors,
    seen_gradients,
)

from strop.types import UserError

ROWS = random_rows(2, vocab=tiny_models.VOCAB)


def gradients(name, *, is_on):
    model = getattr(tiny_models, name)()
    with seen_gradients(model) as found:
        make_trainer(model, activation_checkpointing=is_on).step(make_batch(*ROWS), make_objective())
    assert not any(module.training for module in model.modules())
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_gradients_are_the_same_bit_for_bit(name):
    assert same_tensors(gradients(name, is_on=True), gradients(name, is_on=False))


def kept_bytes(*, is_on, layers=8):
    """What autograd keeps of a forward and backward pass, counted where it is saved."""
    model, total = tiny_models.llama(num_hidden_layers=layers, intermediate_size=256), 0

    def count(tensor):
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    trainer = make_trainer(model, activation_checkpointing=is_on)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t), trainer._recompute.around_step():
        trainer._policy(make_batch(*ROWS), temperature=1.0, layout="padded", with_entropy=False)
    return total


def test_the_forward_pass_keeps_a_fraction_of_its_numbers():
    assert kept_bytes(is_on=True) < kept_bytes(is_on=False) / 4


def test_layers_are_computed_twice():
    calls = []
    for is_on in (False, True):
        model, count = tiny_models.llama(), [0]
        trainer = make_trainer(model, activation_checkpointing=is_on)
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        trainer.step(make_batch(*ROWS), make_objective())
        calls.append(count[0])
    assert calls == [1, 2]


def test_the_critics_layers_are_checkpointed_too():
    critic = make_critic(tiny_models.llama(), activation_checkpointing=True)
    assert all(layer.gradient_checkpointing for layer in critic.model.body.layers)


def test_a_model_without_layers_to_checkpoint_is_refused():
    with pytest.raises(UserError, match=r"trainer\.activation_checkpointing must be false for Bigram, got true"):
        make_trainer(tiny_models.bigram(), activation_checkpointing=True)


def test_a_layer_that_would_drop_something_out_is_refused():
    with pytest.raises(UserError, match=r"must be false for OPTForCausalLM, got true: its layers drop something out"):
        make_trainer(tiny_models.opt(), activation_checkpointing=True)
