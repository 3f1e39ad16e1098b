"""Requests for the engine, and a way to run several of them."""

import asyncio

from strop.engines import TorchEngine
from strop.types import GenerateRequest, Sampling

DEADLINE_S = 10  # a test that waits longer hangs: an engine step of a tiny model takes milliseconds


def request(prompt, seeds=(1,), *, length=8, **sampling):
    return GenerateRequest(tuple(prompt), tuple(seeds), Sampling(max_response_tokens=length, **sampling))


def engine_of(model, *, stop=(), max_sequences=64):
    return TorchEngine(model, stop_token_ids=stop, max_sequences=max_sequences)


async def answers(engine, requests):
    """All requests in flight together, answers in their order."""
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.gather(*(engine.generate(r) for r in requests))


def run(engine, *requests):
    return asyncio.run(answers(engine, requests))
