"""Samples, log-probabilities and new weights of a real vLLM server."""

import asyncio
import os
import signal
import time

import pytest
import torch
from real_model import largest_gap, moved, options, requests, servers_below

from strop.engines.vllm.engine import VLLMEngine
from strop.engines.vllm.process import Served
from strop.types import GenerateRequest, ModelError, Sampling

AGREES = 1e-3  # nats


def engine_of(model, chosen, folder="", tell=print):
    return VLLMEngine(
        chosen,
        Served(str(folder), "float32", on_cpu=True),
        list(model.named_parameters()),
        stop_token_ids=(),
        tell=tell,
    )


async def sampled(engine, asked):
    return await asyncio.gather(*map(engine.generate, asked))


@pytest.mark.parametrize("changes_only", [False, True], ids=["whole", "changes only"])
def test_logprobs_are_the_trainers_before_and_after_an_update(model, address, changes_only, tmp_path):
    chosen = options("", [address], transfer_changes_only=changes_only, transfer_folder=str(tmp_path / "weights"))
    asked = requests(model)

    async def work():
        engine = engine_of(model, chosen)
        try:
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
            scored = await engine.logprobs([*asked[0].prompt_tokens, *after[0][0].tokens])
        finally:
            await engine.close()
        return gaps, stale, metrics, small, after, scored

    gaps, stale, metrics, small, after, scored = asyncio.run(work())
    print("largest gaps", gaps, "against old weights", stale, {n: m.value for n, m in metrics.items()})
    print("one tensor", {n: m.value for n, m in small.items()})
    assert max(gaps) < AGREES
    assert stale > 10 * AGREES
    assert {v for completions in after for c in completions for v in c.policy_versions} == {1}
    assert (small["weights_bytes"].value < metrics["weights_bytes"].value / 50) is changes_only
    assert len(scored) == len(asked[0].prompt_tokens) + 12
    assert list((tmp_path / "weights").iterdir()) == []


def test_logprobs_are_those_at_the_sampling_temperature(model, address):
    async def work():
        engine = engine_of(model, options("", [address]))
        try:
            return await sampled(engine, asked)
        finally:
            await engine.close()

    asked = requests(model, temperature=0.6)
    assert largest_gap(model, asked, asyncio.run(work()), 0.6) < AGREES


def test_a_seed_gives_the_same_sample_again_and_another_seed_another(model, address):
    async def work():
        engine = engine_of(model, options("", [address]))
        try:
            return [await sampled(engine, asked) for _ in range(2)]
        finally:
            await engine.close()

    asked = requests(model)
    first, again = asyncio.run(work())
    tokens = [[c.tokens for c in completions] for completions in first]
    assert tokens == [[c.tokens for c in completions] for completions in again]
    assert all(one != other for one, other in tokens)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_samples_in_flight_go_on_wait_or_end_as_the_pause_mode_says(model, address, mode):
    def asked(length):
        return GenerateRequest((5, 6, 7), tuple(range(4)), Sampling(max_response_tokens=length))

    async def work():
        engine = engine_of(model, options("", [address], pause_mode=mode))
        try:
            await engine.generate(asked(1))
            began = time.monotonic()
            await engine.generate(asked(60))
            flying = asyncio.create_task(engine.generate(asked(500)))
            await asyncio.sleep(1.5 * (time.monotonic() - began))
            await engine.update_weights(moved(model, 0.05).named_parameters(), 7)
            return await flying, await sampled(engine, requests(model))
        finally:
            await engine.close()

    completions, after = asyncio.run(work())
    versions = {v for c in completions for v in c.policy_versions}
    print(mode, [(len(c.tokens), c.policy_versions.count(0), c.finish_reason) for c in completions])
    assert versions == {"keep": {0, 7}, "wait": {0}, "abort": {0}}[mode]
    assert {c.finish_reason for c in completions} == {"abort" if mode == "abort" else "length"}
    assert all(list(c.policy_versions) == sorted(c.policy_versions) for c in completions)
    assert largest_gap(model, requests(model), after) < AGREES


def test_a_renamed_or_missing_tensor_is_an_error_on_either_side_and_the_server_keeps_what_it_has(
    model, address, tmp_path
):
    """Case 23."""
    own = dict(model.named_parameters())
    renamed = {("model.norm.scale" if name == "model.norm.weight" else name): p for name, p in own.items()}
    missing = {name: p for name, p in own.items() if name != "model.norm.weight"}

    async def work():
        engine, trusting = engine_of(model, options("", [address])), engine_of(model, options("", [address]))
        said = []
        try:
            for weights in (renamed, missing):
                with pytest.raises(ModelError) as refused:
                    await engine.update_weights(weights.items(), 1)
                trusting._own = {name: tuple(p.shape) for name, p in weights.items()}  # leave it to the server
                with pytest.raises(ModelError) as by_server:
                    await trusting.update_weights(weights.items(), 1)
                said += [str(refused.value), str(by_server.value)]
            return said, await sampled(engine, requests(model))
        finally:
            await engine.close()
            await trusting.close()

    said, after = asyncio.run(work())
    print(*said, sep="\n")
    assert all("missing ['model.norm.weight']" in words for words in said)
    assert all("unexpected ['model.norm.scale']" in words for words in said[:2])
    assert largest_gap(model, requests(model), after) < AGREES


def test_a_server_that_is_killed_is_started_again_and_holds_the_current_weights(model, folder, python):
    told, others = [], servers_below(os.getpid())

    async def work():
        chosen = options(python, server_args=("--max-model-len", "512"))
        engine = engine_of(model, chosen, folder, told.append)
        try:
            await engine.generate(requests(model)[0])
            await engine.update_weights(moved(model, 0.05).named_parameters(), 1)
            flying = asyncio.create_task(sampled(engine, requests(model, length=100)))
            await asyncio.sleep(0.5)
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
