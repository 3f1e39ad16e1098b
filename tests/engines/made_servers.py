"""Engines whose samples come from elsewhere: small servers for them, work with them, faults between the two, and what must come
of it."""

import asyncio
import threading
from contextlib import ExitStack
from dataclasses import replace

from made_requests import engine_of, request, run

from strop.engines.served.process import Served
from strop.runtime.audit.teacher_server import Dropped, Refused, serving

DEADLINE_S = 20
REQUESTS = [request([3, 4], seeds=(1, 2, 3)), request([5], seeds=(4,)), request([9, 8, 7, 6], seeds=(5, 6))]


def two_of(kind, folder):
    """Two stand-ins of a kind and their addresses, as what a module's fixture `servers` yields."""
    with ExitStack() as open_servers:
        yield [(one, open_servers.enter_context(serving(one))) for one in [kind(folder) for _ in range(2)]]


def runner(kind, options, servers, model):
    """Runs work with an engine, which is closed then; options as they are given."""

    def run_with(work, *, num=1, stop=(), tell=lambda words: None, of=None, transfer=None, **changes):
        here = () if "router" in changes else [address for _, address in servers[:num]]
        addresses = tuple(changes.pop("addresses", here))
        chosen = options(addresses=addresses, **{"start_timeout_s": 60.0, "request_timeout_s": 60.0, **changes})
        weights = list((of or model).named_parameters())
        engine = kind(chosen, Served("", "float32", True), weights, stop_token_ids=stop, tell=tell)
        if transfer is not None:
            engine._fleet._transfer = transfer
        return run_closed(engine, work)

    return run_with


def own(model, *requests, version=0, stop=()):
    """What the engine torch samples from a model."""
    found = run(engine_of(model, stop=stop), *requests)
    return [[replace(c, policy_versions=(version,) * len(c.tokens)) for c in cs] for cs in found]


def agree(found, wanted):
    """Tokens, ends and versions are the same, log-probabilities up to rounding."""
    pairs = [(a, b) for one, other in zip(found, wanted, strict=True) for a, b in zip(one, other, strict=True)]
    assert [(a.tokens, a.finish_reason, a.policy_versions) for a, _ in pairs] == [
        (b.tokens, b.finish_reason, b.policy_versions) for _, b in pairs
    ]
    assert max(abs(x - y) for a, b in pairs for x, y in zip(a.logprobs, b.logprobs, strict=True)) < 1e-4


def run_closed(engine, work):
    """What work with an engine returns, which is closed then."""

    async def whole():
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(whole())


def all_of(requests):
    async def work(engine):
        return await asyncio.gather(*map(engine.generate, requests))

    return work


def on(path, act, *, calls=(1,)):
    """A fault in the calls of these numbers to a path."""
    count, guard = 0, threading.Lock()

    def spoil(where, body, answer):
        nonlocal count
        if not where.endswith(path):
            return answer()
        with guard:
            count += 1
            is_meant = count in calls
        return act(answer) if is_meant else answer()

    return spoil


def drop(answer):
    raise Dropped


def refuse(answer):
    raise Refused(404, "Not Found")


def changed(change):
    """An answer with something different in it."""

    def act(answer):
        found = answer()
        change(found)
        return found

    return act
