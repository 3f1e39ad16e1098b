"""A wait for samples ends: with all of them in order, with what one of them raises, or at its limit with what is missing."""

import asyncio

import pytest

from strop.rollout import all_in_time, not_there, sample_group
from strop.types import EngineError, Prompt, Sampling, WaitError

PROMPTS = [Prompt(row=row, tokens=(5,), text="") for row in (3, 4, 9)]


async def after(seconds, value):
    await asyncio.sleep(seconds)
    return value


def wait_for(*work, limit_s=5.0, tell=lambda text: None):
    return asyncio.run(all_in_time(work, limit_s=limit_s, missing=not_there(PROMPTS, 2), tell=tell))


def test_results_come_in_the_order_of_the_work_whichever_ends_first():
    assert wait_for(after(0.04, "a"), after(0.02, "b"), after(0, "c")) == ["a", "b", "c"]
    assert wait_for() == []


def test_a_wait_without_an_end_of_anything_stops_with_what_is_missing():
    message = (
        r"rollout.timeout_s = 0.1 s went by in which the engine finished no prompt: 2 of 6 samples are there, none or not all "
        r"of prompt rows 4, 9\."
    )
    with pytest.raises(WaitError, match=message):
        wait_for(after(0, "a"), after(60, "b"), after(60, "c"), limit_s=0.1)


def test_the_limit_counts_from_the_last_end_and_not_from_the_first_request():
    assert wait_for(*(after(0.1 * place, place) for place in range(8)), limit_s=0.5) == list(range(8))


def test_what_is_not_done_is_cancelled_at_the_limit_and_where_one_raises():
    cancelled = []

    async def stuck():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append("stuck")
            raise

    async def fails():
        await asyncio.sleep(0.01)
        raise KeyError("x")

    with pytest.raises(WaitError):
        wait_for(stuck(), limit_s=0.05)
    with pytest.raises(KeyError):
        wait_for(stuck(), fails())
    assert cancelled == ["stuck", "stuck"]


def test_a_long_wait_is_told_of_once(monkeypatch):
    monkeypatch.setattr("strop.rollout.in_time.TELL_AFTER_S", 0.05)
    told = []

    async def once_told(seconds, value):
        while not told:
            await asyncio.sleep(0.01)
        return await after(seconds, value)

    found = wait_for(once_told(0, "a"), once_told(0.1, "b"), once_told(0.2, "c"), limit_s=30.0, tell=told.append)
    assert found == ["a", "b", "c"]
    (line,) = told
    assert "0 of 6 samples are there, none or not all of prompt rows 3, 4, 9" in line
    assert "rollout.timeout_s = 30 ends the wait" in line


@pytest.mark.parametrize("given", [0, 1, 3])
def test_an_engine_that_gives_another_number_of_samples_is_an_error_that_names_the_prompt(given):
    class Engine:
        async def generate(self, request):
            return [None] * given

    work = sample_group(Engine(), PROMPTS[2], group_id=0, seeds=[1, 2], sampling=Sampling(), decode=str)
    with pytest.raises(EngineError, match=rf"the engine must give 2 samples of prompt row 9, got {given}\."):
        asyncio.run(work)
