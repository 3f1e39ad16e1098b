"""A trainer whose rows are divided over processes against one in this process: equal numbers, whatever it is asked for."""

import pytest
import rank_processes
import tiny_models
import torch
from trainers.test_several_processes import (
    both,
    lora_llama,
    objective_of,
    preset_objective,
    rows,
)
from trainers.test_tensor_parallel import check_critics, check_steps, check_trainers, padded_llama
from transformers import GraniteConfig, GraniteForCausalLM

from strop.config import TorchTrainerOptions
from strop.config.presets import PRESETS
from strop.runtime.learning import prepare_update
from strop.trainers import TorchTrainer
from strop.trainers.context_parallel import check_shares_heads
from strop.types import GuardError, UserError


@pytest.fixture(scope="module")
def ranks():
    with rank_processes.opened(2, context_parallel=2) as found:
        yield found


def granite():
    """Divides its logits: no plain head."""
    shape = tiny_models.llama().config.to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    more = {"num_hidden_layers": 1, "initializer_range": 0.3, "logits_scaling": 2.0, "pad_token_id": None}
    torch.manual_seed(0)
    return GraniteForCausalLM(GraniteConfig(**{name: shape[name] for name in names}, **more))


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
    "max_tokens_per_micro_batch": 30,
    "layout": "padded",
    "activation_checkpointing": True,
    "max_grad_norm": 0.01,
    "keeps_reference": True,
}


@pytest.mark.parametrize(
    "build, given",
    [
        (padded_llama, {}),  # tied
        (tiny_models.qwen3, {}),
        (tiny_models.phi, {}),  # a head with a bias
        (granite, {}),  # no plain head
        (lora_llama, {"keeps_reference": True}),
        (tiny_models.llama, ALL_OPTIONS),
    ],
    ids=["padded_llama", "qwen3", "phi", "no plain head", "lora", "all options"],
)
def test_a_step_is_that_of_one_process(ranks, build, given):
    check_trainers(ranks, build, given)


def test_ten_steps_of_a_critic_are_those_of_one_process(ranks):
    check_critics(ranks, num_steps=2)


def test_bfloat16_is_exchanged_and_learns_by_float32_masters(ranks):
    one, many = both(ranks, lambda: tiny_models.llama().bfloat16(), lr=1e-4, layout="padded")
    torch.testing.assert_close(many.logprobs(rows()), one.logprobs(rows()), rtol=0, atol=0.1)
    batch = prepare_update(objective_of(), rows(), updates_done=1)
    found, wanted = many.step(batch, objective_of()), one.step(batch, objective_of())
    for name in ("loss", "grad_norm"):
        assert found[name].value == pytest.approx(wanted[name].value, rel=0.01)
    assert {p.dtype for p in many._learning.parameters()} == {torch.float32}


def test_a_rank_computes_its_part_of_every_row_and_of_the_tokens(llamas, monkeypatch):
    _, many = llamas
    batch, layer = rows(), many._learning.model.layers[0]
    widths, tokens = [], []
    hook = layer.register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))
    score = many._policy._score_targets

    def watched(laid, predicting, targets, *more):
        tokens.append((laid.input_ids.shape[1], len(targets)))
        return score(laid, predicting, targets, *more)

    monkeypatch.setattr(many._policy, "_score_targets", watched)
    many.logprobs(batch)
    hook.remove()
    assert widths == [-(-length // 2) for length, _ in tokens]
    assert any(length % 2 for length, _ in tokens)  # rows that do not divide are among them
    assert sum(number for _, number in tokens) <= batch.loss_mask.sum() / 2


def test_a_state_is_that_of_one_process_and_goes_on_with_either(ranks, tmp_path):
    objective = objective_of()
    one, many = both(ranks, tiny_models.llama)
    batch = prepare_update(objective, rows(), updates_done=1)
    many.step(batch, objective)
    many.save(tmp_path)
    one.load(tmp_path)
    assert one.digest() == many.digest()
    check_steps(one, many, objective, num_steps=1)


def test_a_loss_that_is_not_finite_is_blamed_on_its_sequence_before_weights_move(llamas):
    objective = objective_of()
    batch = prepare_update(objective, rows(), updates_done=1)
    batch.advantages[batch.loss_mask & (batch.sequence_ids == 3)] = torch.inf
    before = llamas[1].digest()
    for trainer in llamas:
        with pytest.raises(GuardError) as error:
            trainer.step(batch, objective)
        assert error.value.blamed == ("sample 0 of prompt row 3",)
    assert llamas[1].digest() == before


@pytest.mark.parametrize(
    "build, size, beside, reason",
    [
        (tiny_models.llama, 3, 1, "must divide num_attention_heads of LlamaForCausalLM, 4, got 3"),
        (tiny_models.llama, 4, 1, "must divide num_key_value_heads of LlamaForCausalLM, 2, got 4"),
        (
            tiny_models.llama,
            2,
            2,
            "must divide num_key_value_heads of LlamaForCausalLM, 2, with trainer.tensor_parallel = 2",
        ),
        (tiny_models.sliding_mistral, 2, 1, "must be 1 for MistralForCausalLM, got 2: its layers do not all attend"),
    ],
)
def test_a_model_whose_rows_cannot_be_divided_is_refused(build, size, beside, reason):
    with pytest.raises(UserError) as error:
        check_shares_heads(build(), size, tensor_parallel=beside)
    assert str(error.value).startswith(f"trainer.context_parallel {reason}")


def of_all_before(module, given):
    """A sum over all positions before one, which lie in other ranks."""
    return (given[0].cumsum(1), *given[1:])


def test_a_model_that_is_another_one_when_divided_is_refused_and_the_ranks_go_on(ranks):
    model = tiny_models.llama()
    model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(of_all_before)
    with pytest.raises(UserError) as error:
        ranks.make(TorchTrainer, model, TorchTrainerOptions(), total_steps=1)
    assert "trainer.context_parallel must be 1 for LlamaForCausalLM, got 2: divided it does not compute" in str(
        error.value
    )
    one, many = both(ranks, tiny_models.llama)
    torch.testing.assert_close(many.logprobs(rows()), one.logprobs(rows()), rtol=1e-5, atol=1e-5)
