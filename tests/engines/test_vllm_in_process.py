"""The engine vllm_in_process, with what stands for vLLM: what of it is its own (test_engines_apart.py has the rest)."""

import asyncio
from contextlib import suppress

import pytest
import tiny_models
from made_requests import request
from made_servers import REQUESTS, agree, own, run_closed

from strop.config import VLLMInProcessOptions
from strop.engines.served.process import Served
from strop.engines.vllm.core import Core
from strop.engines.vllm.in_process import VLLMInProcess
from strop.runtime.audit.vllm_core import CoreStandIn, in_place_of_vllm
from strop.types import EngineError, ModelError, UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("here") / "model"
    tiny_models.llama().save_pretrained(folder)
    return folder


@pytest.fixture
def vllm(folder, model):
    """Runs work with an engine, which is closed then; options as they are given."""

    def run_with(work, *, of=None, path=folder, tell=lambda words: None, **options):
        served, weights = Served(str(path), "float32", True), list((of or model).named_parameters())
        engine = VLLMInProcess(VLLMInProcessOptions(**options), served, weights, stop_token_ids=(), tell=tell)
        return run_closed(engine, work)

    CoreStandIn.did.clear()
    with in_place_of_vllm():
        yield run_with


async def until(is_so):
    async with asyncio.timeout(5):
        while not is_so():
            await asyncio.sleep(0)


def num_tokens(engine):
    """That the samples in flight have so far."""
    return sum(len(flying.found) for flying in engine._core._flying.values())


def test_samples_in_flight_go_on_with_new_weights_and_say_which_sampled_each_token(vllm):
    source = tiny_models.llama(7)

    async def work(engine):
        flying = asyncio.create_task(engine.generate(request([3], seeds=(1, 2), length=60)))
        await until(lambda: engine._core is not None and num_tokens(engine) == 2 * 20)
        await engine.update_weights(source.named_parameters(), 4)
        return await flying, await engine.generate(REQUESTS[0])

    completions, after = vllm(work)
    assert [c.policy_versions for c in completions] == [(0,) * 20 + (4,) * 40] * 2
    agree([after], own(source, REQUESTS[0], version=4))


def test_a_request_that_is_cancelled_leaves_and_the_others_go_on(vllm, model):
    async def work(engine):
        dropped, kept = (asyncio.create_task(engine.generate(request([3], seeds=(n,), length=60))) for n in (1, 2))
        await until(lambda: engine._core is not None and num_tokens(engine) == 2 * 20)
        dropped.cancel()
        with suppress(asyncio.CancelledError):
            await dropped
        await until(lambda: len(engine._core._flying) == 1)
        return await kept

    agree([vllm(work)], own(model, request([3], seeds=(2,), length=60)))


def test_requests_of_the_same_moment_start_together_so_that_a_run_is_made_the_same_way_again(vllm, monkeypatch):
    seen, step = [], CoreStandIn.step
    monkeypatch.setattr(
        CoreStandIn, "step", lambda core, wanted, *more: seen.append(len(wanted)) or step(core, wanted, *more)
    )

    async def work(engine):
        await asyncio.gather(*map(engine.generate, REQUESTS))

    vllm(work)
    assert seen == [6, *[0] * 7]


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"tie_word_embeddings": True}, "missing ['lm_head.weight']"),
        ({"intermediate_size": 20}, "mlp.up_proj.weight (20, 16)"),
    ],
    ids=["names", "shapes"],
)
def test_a_vllm_of_another_model_refuses_the_weights_and_says_why(vllm, changes, said):
    """Case 23, on vLLM's side, which holds an untied model."""
    with pytest.raises(ModelError, match="weights do not fit the model of vLLM in this process: ") as refused:
        vllm(lambda engine: engine.generate(REQUESTS[0]), of=tiny_models.llama(**changes))
    assert said in str(refused.value)


def test_with_sleep_it_rests_while_the_trainer_works_and_wakes_for_samples_and_for_weights(vllm, model):
    async def work(engine):
        await engine.rest()  # nothing is there yet
        before = await engine.generate(REQUESTS[0])
        await engine.rest()
        await engine.rest()
        after = await engine.generate(REQUESTS[0])
        await engine.rest()
        await engine.update_weights(model.named_parameters(), 1)
        return before, after

    before, after = vllm(work, sleep=True, engine_args=("--seed", "7"))
    agree([before, after], own(model, REQUESTS[0], REQUESTS[0]))
    assert CoreStandIn.did == {"started with ['--seed', '7']": 1, "sleep": 2, "wake_up": 2, "close": 1}


def test_without_sleep_it_does_not_rest(vllm):
    async def work(engine):
        await engine.generate(REQUESTS[0])
        await engine.rest()

    vllm(work)
    assert CoreStandIn.did["sleep"] == 0


def test_after_its_end_it_starts_anew_with_the_weights_that_it_was_made_with(vllm, model):
    told = []

    async def work(engine):
        await engine.update_weights(tiny_models.llama(7).named_parameters(), 1)
        await engine.close()
        engine.policy_version = 0
        return await engine.generate(REQUESTS[0])

    agree([vllm(work, tell=told.append)], own(model, REQUESTS[0]))
    assert told == ["vLLM starts in this process"] * 2


def test_a_vllm_that_does_not_start_is_not_started_again_for_every_prompt(vllm, monkeypatch):
    def refuse(core, served, args, *, can_sleep):
        raise UserError("it does not start")

    monkeypatch.setattr(CoreStandIn, "__init__", refuse)
    told = []
    with pytest.raises(UserError, match="it does not start"):
        vllm(lambda engine: asyncio.gather(*map(engine.generate, REQUESTS)), tell=told.append)
    assert len(told) == 1


@pytest.mark.parametrize("act", ["step", "update"])
def test_what_vllm_fails_with_ends_the_run_and_is_told(vllm, monkeypatch, act):
    def fail(*given):
        raise RuntimeError("out of blocks")

    monkeypatch.setattr(CoreStandIn, act, fail)
    with pytest.raises(EngineError, match="vLLM failed in this process: RuntimeError: out of blocks"):
        vllm(lambda engine: engine.generate(REQUESTS[0]))


def test_a_vllm_that_says_other_weights_after_an_update_ends_the_run(vllm, monkeypatch):
    monkeypatch.setattr(CoreStandIn, "label_now", lambda core: "default")
    with pytest.raises(EngineError, match="must hold weights 0:0 after its update, and says default"):
        vllm(lambda engine: engine.generate(REQUESTS[0]))


def test_without_vllm_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("strop.engines.vllm.core.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"engine\.kind = vllm_in_process needs vLLM in the environment that runs strop"
    ):
        Core.check()
