"""Samples, log-probabilities and new weights of a real vLLM, in a server and in this process."""

import asyncio
import os
import signal
from importlib.util import find_spec

import pytest
import torch
from real_model import (
    AGREES,
    largest_gap,
    logprobs_of,
    moved,
    options,
    requests,
    servers_below,
    tokens_sampled,
    until_sampled,
)

from strop.config import VLLMInProcessOptions
from strop.engines.vllm.engine import VLLMEngine
from strop.engines.vllm.in_process import VLLMInProcess
from strop.engines.vllm.process import Served
from strop.types import GenerateRequest, ModelError, Sampling


def engine_of(model, chosen, folder="", tell=print):
    served, weights = Served(str(folder), "float32", on_cpu=True), list(model.named_parameters())
    kind = VLLMInProcess if isinstance(chosen, VLLMInProcessOptions) else VLLMEngine
    return kind(chosen, served, weights, stop_token_ids=(), tell=tell)


async def sampled(engine, asked):
    return await asyncio.gather(*map(engine.generate, asked))


def closed(engine, work):
    """What work with an engine returns, which is closed then."""

    async def whole():
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(whole())


@pytest.fixture(params=["server", "in_process"])
def chosen(request):
    """Options of an engine: a server's that is there already, or those of vLLM in this process."""
    return chosen_as(request, request.param)


def chosen_as(request, place, **changes):
    if place == "server":
        return options("", [request.getfixturevalue("address")], **changes)
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not in this environment: make test-vllm runs it in the other one, too")
    return VLLMInProcessOptions(engine_args=("--max-model-len", "512"), **changes)


@pytest.mark.parametrize("place", ["server", "server, changes only", "in_process"])
def test_logprobs_are_the_trainers_before_and_after_an_update(model, folder, request, place, tmp_path):
    place, _, changes_only = place.partition(", ")
    files = {"transfer_changes_only": bool(changes_only), "transfer_folder": str(tmp_path / "weights")}
    chosen = chosen_as(request, place, **(files if place == "server" else {}))
    asked = requests(model)

    async def work(engine):
        before = await sampled(engine, asked)
        gaps = [largest_gap(model, asked, before)]
        moved(model, 0.05)
        stale = largest_gap(model, asked, before)
        metrics = await engine.update_weights(model.named_parameters(), 1)
        after = await sampled(engine, asked)
        gaps.append(largest_gap(model, asked, after))
        with torch.no_grad():  # an update of one tensor, which the changes alone carry
            model.model.norm.weight.mul_(1.05)
        small = await engine.update_weights(model.named_parameters(), 2)
        gaps.append(largest_gap(model, asked, await sampled(engine, asked)))
        return gaps, stale, metrics, small, after, await engine.logprobs([*asked[0].prompt_tokens, *after[0][0].tokens])

    gaps, stale, metrics, small, after, scored = closed(engine_of(model, chosen, folder), work)
    print("largest gaps", gaps, "against old weights", stale, {n: m.value for n, m in metrics.items()})
    print("one tensor", {n: m.value for n, m in small.items()})
    assert max(gaps) < AGREES
    assert stale > 10 * AGREES
    assert {v for completions in after for c in completions for v in c.policy_versions} == {1}
    assert (small["weights_bytes"].value < metrics["weights_bytes"].value / 50) is bool(changes_only)
    prompt, tokens = asked[0].prompt_tokens, after[0][0].tokens
    assert scored[len(prompt) :] == pytest.approx(logprobs_of(model, prompt, tokens), abs=AGREES)
    assert not (tmp_path / "weights").exists() or list((tmp_path / "weights").iterdir()) == []


def test_logprobs_are_those_at_the_sampling_temperature(model, folder, chosen):
    asked = requests(model, temperature=0.6)
    found = closed(engine_of(model, chosen, folder), lambda engine: sampled(engine, asked))
    assert largest_gap(model, asked, found, 0.6) < AGREES


def test_a_seed_gives_the_same_sample_again_and_another_seed_another(model, folder, chosen):
    async def work(engine):
        return [await sampled(engine, asked) for _ in range(2)]

    asked = requests(model)
    first, again = closed(engine_of(model, chosen, folder), work)
    tokens = [[c.tokens for c in completions] for completions in first]
    assert tokens == [[c.tokens for c in completions] for completions in again]
    assert all(one != other for one, other in tokens)


def test_more_prompts_come_at_once_than_a_step_reads(model, folder, chosen):
    """vLLM would read one of them in parts, and on a CPU fail with its seed."""
    draw = torch.Generator().manual_seed(2)
    prompts = [tuple(torch.randint(2, 30, (400,), generator=draw).tolist()) for _ in range(12)]
    asked = [GenerateRequest(prompt, (1, 2), Sampling(max_response_tokens=3)) for prompt in prompts]
    found = closed(engine_of(model, chosen, folder), lambda engine: sampled(engine, asked))
    assert largest_gap(model, asked, found) < AGREES


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_samples_in_flight_go_on_wait_or_end_as_the_pause_mode_says(model, address, mode):
    def asked(length):
        return GenerateRequest((5, 6, 7), tuple(range(4)), Sampling(max_response_tokens=length))

    async def work(engine):
        await engine.generate(asked(1))
        so_far = tokens_sampled(address)
        flying = asyncio.create_task(engine.generate(asked(500)))
        await until_sampled(address, so_far + 4 * 20, holds=mode != "wait")  # those that wait may as well have ended
        await engine.update_weights(moved(model, 0.05).named_parameters(), 7)
        return await flying, await sampled(engine, requests(model))

    completions, after = closed(engine_of(model, options("", [address], pause_mode=mode)), work)
    versions = {v for c in completions for v in c.policy_versions}
    print(mode, [(len(c.tokens), c.policy_versions.count(0), c.finish_reason) for c in completions])
    assert versions == {"keep": {0, 7}, "wait": {0}, "abort": {0}}[mode]
    assert {c.finish_reason for c in completions} == {"abort" if mode == "abort" else "length"}
    assert all(list(c.policy_versions) == sorted(c.policy_versions) for c in completions)
    assert largest_gap(model, requests(model), after) < AGREES


def test_a_renamed_or_missing_tensor_is_an_error_on_either_side_and_vllm_keeps_what_it_has(model, folder, chosen):
    """Case 23."""
    own = dict(model.named_parameters())
    renamed = {("model.norm.scale" if name == "model.norm.weight" else name): p for name, p in own.items()}
    missing = {name: p for name, p in own.items() if name != "model.norm.weight"}

    async def work(engine):
        said, begun = [], await sampled(engine, requests(model))
        known = engine._own
        for weights in (renamed, missing):
            with pytest.raises(ModelError) as refused:
                await engine.update_weights(weights.items(), 1)
            engine._own = {name: tuple(p.shape) for name, p in weights.items()}  # leave it to vLLM
            with pytest.raises(ModelError) as by_vllm:
                await engine.update_weights(weights.items(), 1)
            engine._own = known
            said += [str(refused.value), str(by_vllm.value)]
        return said, begun, await sampled(engine, requests(model))

    said, begun, after = closed(engine_of(model, chosen, folder), work)
    print(*said, sep="\n")
    assert all("missing ['model.norm.weight']" in words for words in said)
    assert all("unexpected ['model.norm.scale']" in words for words in said[:2])
    assert max(largest_gap(model, requests(model), found) for found in (begun, after)) < AGREES


def test_a_server_that_is_killed_is_started_again_and_holds_the_current_weights(model, folder, python):
    told, others = [], servers_below(os.getpid())

    async def work():
        chosen = options(python, server_args=("--max-model-len", "512"))
        engine = engine_of(model, chosen, folder, told.append)
        try:
            await engine.generate(requests(model)[0])
            await engine.update_weights(moved(model, 0.05).named_parameters(), 1)
            address = engine._fleet.servers[0].address
            so_far = tokens_sampled(address)
            flying = asyncio.create_task(sampled(engine, requests(model, length=400)))
            await until_sampled(address, so_far + 8 * 5)
            killed = servers_below(os.getpid()) - others
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            answers = await flying
            metrics = await engine.update_weights(moved(model, 0.05, seed=1).named_parameters(), 2)
            return killed, answers, metrics, await sampled(engine, requests(model))
        finally:
            await engine.close()

    killed, answers, metrics, after = asyncio.run(work())
    print(len(killed), told, {n: m.value for n, m in metrics.items()})
    assert killed
    assert {v for completions in answers for c in completions for v in c.policy_versions} == {1}
    assert metrics["engine_restarts"].value == 1
    assert largest_gap(model, requests(model), after) < AGREES
    assert servers_below(os.getpid()) <= others
