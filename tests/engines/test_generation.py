"""What the engine samples: transformers' greedy text, the trainer's log-probabilities, and where a response ends."""

import asyncio
from dataclasses import replace

import pytest
import tiny_models
import torch
from made_requests import engine_of, request, rollout_of, run

from strop import ops
from strop.algorithms import LikelihoodObjective, PolicyObjective
from strop.config import AlgorithmOptions, TorchTrainerOptions
from strop.data import build_batch
from strop.engines.decoders import has_full_attention
from strop.trainers import TorchTrainer
from strop.types import UserError

MODELS = tiny_models.BUILDERS
PROMPTS = [(3,), (1, 2, 3, 4, 5, 6, 7), (9, 8), (20, 21, 22, 23)]


# ---- against transformers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_what_transformers_generates(name):
    model = MODELS[name]()
    found = run(engine_of(model), *(request(p, length=12, temperature=0.0) for p in PROMPTS))
    for prompt, (completion,) in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        wanted = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert completion.tokens == tuple(wanted[0, len(prompt) :].tolist())


@pytest.mark.parametrize("name", MODELS)
def test_the_slot_cache_is_used_only_where_every_layer_sees_everything(name):
    assert has_full_attention(MODELS[name]()) == (name in tiny_models.FULL_ATTENTION)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_engines_logprobs_of_given_tokens_are_the_models(name):
    model, tokens = MODELS[name](), [3, 1, 4, 1, 5]
    found = asyncio.run(engine_of(model).logprobs(tokens))
    with torch.no_grad():
        log_p = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].double().log_softmax(-1)
    assert found == pytest.approx([0.0, *(log_p[i, tokens[i + 1]].item() for i in range(4))], abs=1e-5)


# ---- against the trainer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", MODELS)
def test_sampled_logprobs_agree_with_the_trainers(name, temperature):
    model = MODELS[name]()
    requests = [request(p, seeds=(5, 6, 7), length=12, temperature=temperature) for p in PROMPTS]
    found = run(engine_of(model, stop=[2, 11], max_sequences=5), *requests)
    rollouts = [
        rollout_of(prompt, c, row)
        for row, (prompt, group) in enumerate(zip(PROMPTS, found, strict=True))
        for c in group
    ]
    assert len({r.tokens for r in rollouts}) > 8  # they are samples, not one text
    batch = build_batch(rollouts, [1.0] * len(rollouts))
    for layout in ("padded", "packed"):
        trainer = TorchTrainer(model, TorchTrainerOptions(layout=layout), total_steps=1)
        trained = trainer.logprobs(batch, temperature=temperature)
        # the promise: 1e-4 in float32 on a CPU
        assert (trained - batch.rollout_logprobs).abs().max() < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_a_model_shared_with_the_trainer_samples_learns_and_samples_again(name):
    # the guard of the real step compares both views of the policy, before and after weights have moved
    model = MODELS[name]()
    engine = engine_of(model)
    options = TorchTrainerOptions(lr=0.02)
    trainer = TorchTrainer(model, options, total_steps=3, max_logprob_gap=1e-4)
    objective = PolicyObjective(AlgorithmOptions(), temperature=0.7, max_response_tokens=8)
    for _ in range(3):
        groups = run(engine, *(request(p, seeds=(1, 2), temperature=0.7) for p in PROMPTS))
        rollouts = [
            rollout_of(p, c, row) for row, (p, group) in enumerate(zip(PROMPTS, groups, strict=True)) for c in group
        ]
        batch = build_batch(rollouts, [1.0, -1.0] * len(PROMPTS))
        weights = ops.token_weights(batch.loss_mask, batch.sequence_ids, reduction="token_mean")
        metrics = trainer.step(replace(batch, token_weights=weights), objective)
        assert metrics["logprob_gap_max"].value < 1e-4
        assert metrics["grad_norm"].value > 0


# ---- where a response ends -------------------------------------------------------------------------------------------


def chain(*next_tokens):
    """A bigram model that goes from token i to next_tokens[i], all but surely."""
    size = len(next_tokens)
    off = 1e-6
    return tiny_models.bigram([[1 - off * (size - 1) if j == t else off for j in range(size)] for t in next_tokens])


COUNTING = (1, 2, 3, 4, 5, 6, 7, 0)  # 0 -> 1 -> 2 -> ... -> 7 -> 0


def test_generation_stops_at_any_of_several_end_ids_and_keeps_it():
    # case 22: end ids [1, 106]; here 7 and 5, and counting up from 3 meets 5 first
    (completion,) = run(engine_of(chain(*COUNTING), stop=[7, 5]), request([2]))[0]
    assert completion.tokens == (3, 4, 5)
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize("end", [1, 106])
def test_the_second_end_id_of_a_larger_vocabulary_ends_too(end):
    # case 22 with its own numbers: everything leads to `end`
    (completion,) = run(engine_of(chain(*[end] * 107), stop=[1, 106]), request([50]))[0]
    assert completion.tokens == (end,)
    assert completion.finish_reason == "stop"


def test_an_end_id_exactly_at_the_limit_is_a_stop():
    (completion,) = run(engine_of(chain(*COUNTING), stop=[5]), request([2], length=3))[0]
    assert (completion.tokens, completion.finish_reason) == ((3, 4, 5), "stop")


def test_a_response_at_the_limit_without_an_end_is_cut():
    (completion,) = run(engine_of(chain(*COUNTING), stop=[5]), request([2], length=2))[0]
    assert (completion.tokens, completion.finish_reason) == ((3, 4), "length")


def test_end_ids_of_a_request_count_beside_those_of_the_model_and_for_it_alone():
    engine = engine_of(chain(*COUNTING), stop=[6])
    own, other = run(engine, request([2], stop_token_ids=(4,)), request([2]))
    assert own[0].tokens == (3, 4)
    assert other[0].tokens == (3, 4, 5, 6)


def test_an_end_id_in_the_prompt_does_not_end_the_response():
    (completion,) = run(engine_of(chain(*COUNTING), stop=[5]), request([5, 5], length=2))[0]
    assert completion.tokens == (6, 7)


def test_an_end_token_that_is_the_pad_token_is_sampled_kept_and_trained_on():
    # case 20: end = pad = 2. 4 -> 5 -> 6 -> 2; and 7 -> 8 -> 9 -> 10 -> 11 -> 12 is cut at 5
    model = chain(0, 0, 0, 0, 5, 6, 2, 8, 9, 10, 11, 12, 0)
    model.config.pad_token_id = model.config.eos_token_id = 2
    groups = run(engine_of(model, stop=[2]), request([4], length=5), request([7], length=5))
    ended, cut = groups[0][0], groups[1][0]
    assert (ended.tokens, ended.finish_reason) == ((5, 6, 2), "stop")
    assert (cut.tokens, cut.finish_reason) == ((8, 9, 10, 11, 12), "length")
    batch = build_batch([rollout_of((4,), ended, 0), rollout_of((7,), cut, 1)], [1.0, 1.0])
    assert batch.num_trainable_tokens == 8
    batch = replace(batch, token_weights=batch.loss_mask / 8)
    metrics = TorchTrainer(model, TorchTrainerOptions(), total_steps=1).step(batch, LikelihoodObjective())
    assert metrics["nll"].count == 8


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_request_longer_than_the_model_is_refused_before_anything_runs():
    engine = engine_of(tiny_models.llama())
    with pytest.raises(UserError, match=r"fit the model's 64 positions, got 5 prompt tokens \+ 60 response tokens"):
        run(engine, request(range(5), length=60))
    assert engine.num_sampled_tokens == 0


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_request_that_just_fits_the_model_is_answered(name):
    (completion,) = run(engine_of(MODELS[name]()), request(range(4), length=60))[0]
    assert len(completion.tokens) == 60


def test_an_empty_prompt_is_refused():
    with pytest.raises(UserError, match="at least one token"):
        run(engine_of(tiny_models.llama()), request(()))


def test_a_refused_request_does_not_disturb_the_others():
    async def both(engine):
        good = asyncio.create_task(engine.generate(request([3, 4], seeds=(1, 2))))
        with pytest.raises(UserError):
            await engine.generate(request(range(5), length=60))
        return await good

    assert (
        asyncio.run(both(engine_of(tiny_models.llama())))
        == run(engine_of(tiny_models.llama()), request([3, 4], seeds=(1, 2)))[0]
    )
