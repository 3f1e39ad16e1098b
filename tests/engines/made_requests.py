"""Requests for the engine, a way to run several of them, and rollouts of what came back."""

import asyncio

from strop.engines import TorchEngine
from strop.types import GenerateRequest, Prompt, Rollout, Sampling

DEADLINE_S = 100  # a test that waits longer hangs: an engine step of a tiny model takes milliseconds


def request(prompt, seeds=(1,), *, length=8, **sampling):
    return GenerateRequest(tuple(prompt), tuple(seeds), Sampling(max_response_tokens=length, **sampling))


def engine_of(model, *, stop=(), max_sequences=64, **options):
    return TorchEngine(model, stop_token_ids=stop, max_sequences=max_sequences, **options)


async def answers(engine, requests):
    """All requests in flight together, answers in their order."""
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.gather(*(engine.generate(r) for r in requests))


def run(engine, *requests):
    return asyncio.run(answers(engine, requests))


def rollout_of(prompt, completion, row):
    before = len(prompt)
    return Rollout(
        prompt=Prompt(row=row, tokens=prompt, text=""),
        group_id=row,
        sample=0,
        tokens=prompt + completion.tokens,
        response_mask=(False,) * before + (True,) * len(completion.tokens),
        rollout_logprobs=(0.0,) * before + completion.logprobs,
        policy_versions=(-1,) * before + completion.policy_versions,
        finish_reason=completion.finish_reason,
        text="",
    )
