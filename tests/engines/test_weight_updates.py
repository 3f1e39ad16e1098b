"""New weights come by name and whole, or not at all; every token says which version sampled it."""

import asyncio

import pytest
import tiny_models
import torch
from made_requests import DEADLINE_S, engine_of, request, run

from strop.types import ModelError

REQUEST = request([3, 4], seeds=(1, 2), length=10)


def copies(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def update(engine, weights, version=1):
    asyncio.run(engine.update_weights(weights.items(), version))


@pytest.mark.parametrize("name", ["llama", "tied_llama", "gpt2", "gemma2"])
def test_after_an_update_the_engine_samples_what_the_source_would(name):
    source, model = tiny_models.BUILDERS[name](7), tiny_models.BUILDERS[name]()
    engine = engine_of(model)
    old = run(engine, REQUEST)[0]
    update(engine, copies(source), version=3)
    found, wanted = run(engine, REQUEST)[0], run(engine_of(source), REQUEST)[0]
    assert [c.tokens for c in found] == [c.tokens for c in wanted] != [c.tokens for c in old]
    assert engine.policy_version == 3


def test_a_tied_head_follows_its_embedding():
    # case 23: the embedding alone is sent
    source, model = tiny_models.tied_llama(7), tiny_models.tied_llama()
    weights = copies(source)
    assert "lm_head.weight" not in weights
    update(engine_of(model), weights)
    assert torch.equal(model.lm_head.weight, source.model.embed_tokens.weight)


def renamed(weights):
    changed = dict(weights)
    changed["model.norm.scale"] = changed.pop("model.norm.weight")
    return changed


def test_a_renamed_tensor_is_an_error_that_lists_missing_and_unexpected_names():
    engine = engine_of(tiny_models.llama())
    with pytest.raises(ModelError) as error:
        update(engine, renamed(copies(tiny_models.llama(7))))
    assert "missing ['model.norm.weight'], unexpected ['model.norm.scale']" in str(error.value)
    assert engine.policy_version == 0


@pytest.mark.parametrize("shape", [(37,), (1, 16), (16,), (37, 8)], ids=str)
def test_a_tensor_of_another_shape_is_an_error_that_names_it(shape):
    # (1, 16) and (16,) would spread over all 37 rows without a word
    engine = engine_of(tiny_models.llama())
    weights = copies(tiny_models.llama(7)) | {"lm_head.weight": torch.ones(shape)}
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        update(engine, weights)


def test_a_refused_update_leaves_the_weights_as_they_were():
    model = tiny_models.llama()
    before = copies(model)
    with pytest.raises(ModelError):
        update(engine_of(model), renamed(copies(tiny_models.llama(7))))
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_weights_of_its_own_are_counted_and_not_copied():
    model = tiny_models.tied_llama()
    engine = engine_of(model)
    before = copies(model)
    asyncio.run(engine.update_weights(model.named_parameters(), 5))
    assert engine.policy_version == 5
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_every_token_records_the_version_that_sampled_it():
    async def update_in_flight(engine):
        task = asyncio.create_task(engine.generate(request([3], seeds=(1,), length=12)))
        while engine.num_sampled_tokens < 4:
            await asyncio.sleep(0)
        done = engine.num_sampled_tokens
        await engine.update_weights(copies(tiny_models.llama(7)).items(), 1)
        async with asyncio.timeout(DEADLINE_S):
            return done, (await task)[0]

    done, completion = asyncio.run(update_in_flight(engine_of(tiny_models.llama())))
    assert completion.policy_versions == (0,) * done + (1,) * (12 - done)


def test_without_an_update_all_tokens_are_of_the_version_that_is_set():
    engine = engine_of(tiny_models.llama())
    update(engine, copies(tiny_models.llama(7)), version=41)
    completion = run(engine, REQUEST)[0][0]
    assert set(completion.policy_versions) == {41}
    assert len(completion.policy_versions) == len(completion.logprobs) == len(completion.tokens)


def test_samples_in_flight_go_on_with_new_weights_and_each_token_says_whose_it_is():
    """3 tokens by version 3, then 2 by version 4; the log-probabilities are those at which each was sampled."""

    async def work():
        model = tiny_models.llama()
        engine = engine_of(model)
        await engine.update_weights(copies(model).items(), 3)
        sampling = asyncio.create_task(engine.generate(request([3, 4], length=5)))
        while engine.num_sampled_tokens < 3:
            await asyncio.sleep(0)
        await engine.update_weights(copies(tiny_models.llama(7)).items(), 4)
        async with asyncio.timeout(DEADLINE_S):
            return await sampling

    (found,) = asyncio.run(work())
    assert found.policy_versions == (3, 3, 3, 4, 4)
    (old,) = run(engine_of(tiny_models.llama()), request([3, 4], length=5))[0]
    assert found.tokens[:3] == old.tokens[:3]
    assert found.logprobs[:3] == old.logprobs[:3]
    assert found.logprobs[3:] != old.logprobs[3:]
