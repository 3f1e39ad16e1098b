"""The cap on tokens in flight: never above it, nobody overtaken for ever, and given back whatever happens."""

import asyncio

import pytest

from strop.rollout import TokenBudget


def started(limit, sizes, *, fails=()):
    """The order in which requests of these sizes begin under a limit, and the most tokens that were in flight."""
    order, most = [], 0

    async def all_at_once():
        nonlocal most
        budget = TokenBudget(limit)

        async def request(place, size):
            nonlocal most
            async with budget.holding(size):
                order.append(place)
                most = max(most, sum(sizes[p] for p in order) - sum(sizes[p] for p in ended))
                for _ in range(3):
                    await asyncio.sleep(0)
                ended.append(place)
                if place in fails:
                    raise ValueError(place)

        ended = []
        results = await asyncio.gather(*(request(*r) for r in enumerate(sizes)), return_exceptions=True)
        assert budget.in_flight == 0
        return [r for r in results if isinstance(r, ValueError)]

    errors = asyncio.run(asyncio.wait_for(all_at_once(), 60))
    return order, most, errors


def test_tokens_in_flight_stay_under_the_cap_and_everybody_gets_a_turn():
    order, most, _ = started(10, [4, 4, 4, 4, 4])
    assert order == [0, 1, 2, 3, 4]
    assert most == 8


def test_without_a_cap_all_start_together():
    assert started(None, [4, 4, 4])[1] == 12


def test_a_large_request_is_not_overtaken_by_small_ones_behind_it():
    assert started(10, [6, 10, 1, 1])[0] == [0, 1, 2, 3]


def test_a_request_that_fails_gives_its_tokens_back():
    order, _, errors = started(5, [5, 5, 5], fails=(0, 1))
    assert order == [0, 1, 2]
    assert len(errors) == 2


@pytest.mark.parametrize("limit, most", [(8, 8), (11, 8), (12, 12)])
def test_what_was_most_in_flight_is_known(limit, most):
    async def run():
        budget = TokenBudget(limit)

        async def request():
            async with budget.holding(4):
                await asyncio.sleep(0)
                await asyncio.sleep(0)

        await asyncio.gather(*(request() for _ in range(6)))
        return budget.most_in_flight

    assert asyncio.run(run()) == most
