"""Groups that come all the time are scored side by side, and each is handed over when its last rollout is scored."""

import asyncio
import time

import pytest
from written_rollouts import make_rollout

from strop.config.sampling import CodeRewardOptions, ExactRewardOptions, FunctionRewardOptions
from strop.rewards import make_scorer
from strop.types import Group, RewardError

USERS = """
import asyncio

async def score(rollout):
    if rollout.text == "never":
        await asyncio.sleep(600)
    if rollout.text == "bad":
        raise KeyError("no such tool")
    return len(rollout.text)

def plain(rollout):
    return len(rollout.text)
"""


@pytest.fixture
def scorer_of(tmp_path):
    made = []

    def make(name, **options):
        (tmp_path / "users.py").write_text(USERS)
        made.append(make_scorer(FunctionRewardOptions(function=f"{tmp_path}/users.py:{name}", **options)))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


def group(number, *texts, label=None):
    rollouts = tuple(make_rollout(text, label, row=number, sample=n) for n, text in enumerate(texts))
    return Group(number, rollouts[0].prompt, rollouts)


def streamed(scorer, *groups, until):
    """Put all groups; returns what was handed over by their numbers in that order, and what ended it."""
    found, failures = {}, []

    async def work():
        stream = scorer.stream(lambda group, scored: found.update({group.group_id: scored}), failures.append)
        try:
            async with asyncio.timeout(100):
                for one in groups:
                    stream.put(one)
                    await asyncio.sleep(0.01)
                while not (failures or set(found) == until):
                    await asyncio.sleep(0.005)
        finally:
            stream.close()

    asyncio.run(work())
    return found, failures


def test_a_group_that_is_scored_does_not_wait_for_one_before_it(scorer_of):
    began = time.monotonic()
    found, failures = streamed(
        scorer_of("score"), group(0, "abc", "never"), group(1, "ab", "a"), group(2, "abcd"), until={1, 2}
    )
    assert failures == []
    assert {n: [r.reward for r in scored.rollouts] for n, scored in found.items()} == {1: [2.0, 1.0], 2: [4.0]}
    assert time.monotonic() - began < 90  # the call that never ends is not waited for


def test_a_function_that_is_not_async_is_called_in_its_workers(scorer_of):
    found, failures = streamed(
        scorer_of("plain"), *(group(n, "a" * n, "ab") for n in range(1, 9)), until=set(range(1, 9))
    )
    assert failures == []
    assert {n: scored.rollouts[0].reward for n, scored in found.items()} == {n: float(n) for n in range(1, 9)}


def test_a_failure_ends_it_or_counts_for_its_own_group_as_on_error_says(scorer_of):
    groups = (group(0, "abc", "bad"), group(1, "ab"))
    found, failures = streamed(scorer_of("score", on_error="zero"), *groups, until={0, 1})
    assert [r.reward for r in found[0].rollouts] == [3.0, 0.0]
    assert [found[n].metrics["reward/num_errors"].value for n in (0, 1)] == [1, 0]
    found, failures = streamed(scorer_of("score"), *groups, until={0})
    assert isinstance(failures[0], RewardError)
    assert "KeyError: 'no such tool'" in str(failures[0])
    assert 0 not in found


def test_programs_are_scored_and_counted_group_by_group():
    scorer = make_scorer(CodeRewardOptions(isolation="limits"))
    try:
        right, wrong = "```python\nx = 3\n```", "```python\nx = 4\n```"
        label = '["assert x == 3"]'
        found, failures = streamed(
            scorer, group(0, right, wrong, label=label), group(1, wrong, label=label), until={0, 1}
        )
    finally:
        scorer.close()
    assert failures == []
    assert [[r.reward for r in found[n].rollouts] for n in (0, 1)] == [[1.0, 0.0], [0.0]]
    assert sum(found[n].metrics["reward/num_wrong"].value for n in (0, 1)) == 2


def test_what_this_process_scores_is_not_streamed():
    assert make_scorer(ExactRewardOptions()).stream(print, print) is None
