"""A trainer whose layers are divided over processes against one in this process: equal numbers, whatever it is asked for."""

from functools import partial

import pytest
import rank_processes
import tiny_models
import torch
from trainers.test_several_processes import (
    both,
    check_equal,
    check_same_weights,
    objective_of,
    preset_objective,
    rows,
)
from transformers import MixtralConfig, MixtralForCausalLM

from strop.config import CriticOptions, TorchTrainerOptions
from strop.config.presets import PRESETS
from strop.runtime.learning import prepare_update
from strop.trainers import TorchCritic, TorchTrainer, ValueModel, body_of
from strop.trainers.tensor_parallel import check_divides
from strop.types import GuardError, UserError

PADDING = 30


@pytest.fixture(scope="module")
def ranks():
    with rank_processes.opened(2, tensor_parallel=2) as found:
        yield found


def mixtral():
    shape = tiny_models.llama().config.to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return MixtralForCausalLM(MixtralConfig(**{n: shape[n] for n in names}, num_hidden_layers=1, num_local_experts=2))


def padded_llama():
    """Its head is tied to its embedding, which reads one of the tokens without gradient; the second of two ranks has it."""
    return tiny_models.llama(tie_word_embeddings=True, pad_token_id=PADDING)


def forgetful_qwen3():
    model = tiny_models.qwen3()
    del model.tp_plan["model.layers.*.self_attn.k_norm"]
    return model


def check_steps(one, many, objective, *, num_steps):
    for step in range(num_steps):
        batch = prepare_update(objective, rows(step), updates_done=1)
        check_equal(many.step(batch, objective), one.step(batch, objective))
    check_same_weights(one, many)


def check_trainers(ranks, build, given):
    """Two steps, and what is scored after them. AdamW makes steps of the learning rate of gradients however small, also of
    those that are 0 but for rounding, as keys' biases have; with a larger epsilon it does not."""
    one, many = both(ranks, build, adam_eps=1e-3, **given)
    check_steps(one, many, objective_of(entropy_coef=0.01), num_steps=2)
    for which in ("policy", "reference") if given else ("policy",):
        found, wanted = (trainer.logprobs(rows(9), model=which) for trainer in (many, one))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def check_critics(ranks, *, num_steps):
    """Steps, and the values after them."""

    def build():
        return ValueModel(body_of(tiny_models.llama()))

    one, many = both(ranks, build, kind=TorchCritic, more=(CriticOptions(lr=1e-3),))
    for step in range(num_steps):
        check_equal(many.step(rows(step)), one.step(rows(step)))
    torch.testing.assert_close(many.values(rows()), one.values(rows()), rtol=1e-5, atol=1e-5)
    check_same_weights(one, many)


@pytest.fixture(scope="module")
def llamas(ranks):
    """The same in one process and over the ranks, as they were before any step; made once, since that takes a second."""
    one, many = both(ranks, tiny_models.llama)
    for trainer in (one, many):
        trainer.remember(moments=True)
    return one, many


@pytest.mark.parametrize("preset", PRESETS)
def test_ten_steps_of_a_preset_are_those_of_one_process(llamas, preset):
    for trainer in llamas:
        trainer.go_back()
    check_steps(*llamas, preset_objective(preset), num_steps=2)


ALL_OPTIONS = {
    "max_tokens_per_micro_batch": 30,  # ranks with several micro-batches, not as many each
    "layout": "shared",
    "activation_checkpointing": True,
    "max_grad_norm": 0.01,  # the norm is that of all parts
    "keeps_reference": True,
}


@pytest.mark.parametrize(
    "build, given",
    [
        (padded_llama, {}),
        (tiny_models.qwen3, {}),  # norms whose gradient is the sum over heads
        (tiny_models.phi, {}),  # biases of what is divided by rows, of what is divided by columns, and of the head
        (tiny_models.gemma2, {}),  # no plain head
        (tiny_models.llama, ALL_OPTIONS),
    ],
    ids=["padded_llama", "qwen3", "phi", "gemma2", "all options"],
)
def test_a_step_is_that_of_one_process(ranks, build, given):
    check_trainers(ranks, build, given)


def test_ten_steps_of_a_critic_are_those_of_one_process(ranks):
    check_critics(ranks, num_steps=3)


def test_a_rank_holds_its_part_of_every_matrix(llamas):
    _, many = llamas
    for name, parameter in many._learning.named_parameters():
        parts = parameter.dim()  # of a matrix each has half, of a norm the whole
        assert parameter.to_local().numel() <= parameter.numel() / parts + 8, name  # 37 tokens do not divide


def test_bfloat16_learns_by_divided_float32_masters(ranks):
    one, many = both(ranks, lambda: tiny_models.llama().bfloat16(), lr=1e-4)
    objective = objective_of()
    torch.testing.assert_close(many.logprobs(rows()), one.logprobs(rows()), rtol=0, atol=0.1)
    batch = prepare_update(objective, rows(), updates_done=1)
    found, wanted = many.step(batch, objective), one.step(batch, objective)
    for name in ("loss", "grad_norm"):
        assert found[name].value == pytest.approx(wanted[name].value, rel=0.05)
    assert {p.dtype for p in many._learning.parameters()} == {torch.float32}


def test_a_state_is_that_of_one_process_and_goes_on_with_either(ranks, tmp_path):
    objective = objective_of()
    one, many = both(ranks, tiny_models.tied_llama, keeps_reference=True)
    batch = prepare_update(objective, rows(), updates_done=1)
    many.step(batch, objective)
    many.save(tmp_path)
    one.load(tmp_path)
    _, again = both(ranks, partial(tiny_models.tied_llama, seed=1), keeps_reference=True)
    again.load(tmp_path)
    assert one.digest() == many.digest() == again.digest()
    batch = prepare_update(objective, rows(2), updates_done=1)
    found, wanted = many.step(batch, objective), one.step(batch, objective)
    check_equal(found, wanted)
    assert again.step(batch, objective) == found  # to the bit
    assert again.digest() == many.digest()
    check_same_weights(one, many)
    many.remember(moments=True)
    many.step(batch, objective)
    many.go_back()
    assert many.digest() == again.digest()


def test_a_loss_that_is_not_finite_is_blamed_on_its_sequence_before_weights_move(llamas):
    one, many = llamas
    objective = objective_of()
    batch = prepare_update(objective, rows(), updates_done=1)
    batch.advantages[batch.loss_mask & (batch.sequence_ids == 3)] = torch.inf
    before = many.digest()
    for trainer in (one, many):
        with pytest.raises(GuardError, match="It comes from sample 0 of prompt row 3") as error:
            trainer.step(batch, objective)
        assert error.value.blamed == ("sample 0 of prompt row 3",)
    assert many.digest() == before


@pytest.mark.parametrize(
    "build, size, reason",
    [
        (tiny_models.llama, 3, "must divide num_attention_heads of LlamaForCausalLM, 4, got 3"),
        (tiny_models.llama, 4, "must divide num_key_value_heads of LlamaForCausalLM, 2, got 4"),
        (partial(tiny_models.llama, intermediate_size=25), 2, "mlp.gate_proj has 25 outputs"),
        (tiny_models.gpt2, 2, "must be 1 for GPT2LMHeadModel, got 2: transformers has no plan"),
        (tiny_models.bigram, 2, "must be 1 for Bigram, got 2: transformers has no plan"),
        (mixtral, 2, "must be 1 for MixtralForCausalLM, got 2: the plan of transformers has model.layers.0.mlp"),
        (forgetful_qwen3, 2, "the plan of transformers leaves model.layers.0.self_attn.k_norm out"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(build, size, reason):
    with pytest.raises(UserError) as error:
        check_divides(build(), size)
    assert str(error.value).startswith("trainer.tensor_parallel ")
    assert reason in str(error.value)


def unit_length(module, given):
    """Of the numbers of all heads together, which no rank has."""
    return (given[0] / given[0].norm(dim=-1, keepdim=True), *given[1:])


def test_a_model_that_is_another_one_when_divided_is_refused_and_the_ranks_go_on(ranks):
    model = tiny_models.llama()
    model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(unit_length)
    with pytest.raises(UserError) as error:
        ranks.make(TorchTrainer, model, TorchTrainerOptions(), total_steps=1)
    assert "LlamaForCausalLM, got 2: divided it does not compute the same (numbers differ by " in str(error.value)
    one, many = both(ranks, tiny_models.llama)
    torch.testing.assert_close(many.logprobs(rows()), one.logprobs(rows()), rtol=1e-5, atol=1e-5)
