"""Async scoring functions: side by side up to a limit, each with its own outcome, on a loop that lasts."""

import asyncio
import textwrap
import threading
import time
from functools import partial

import pytest
from rewards.written_rollouts import make_rollout

from strop.config.sampling import FunctionRewardOptions, SlimeRewardOptions
from strop.rewards import make_scorer
from strop.rewards.concurrent import Running, cancel
from strop.types import RewardError

COUNTS = """
import asyncio
running = most = 0

async def score({}rollout):
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.01)
    running -= 1
    return most
"""


@pytest.fixture
def scorer_of(tmp_path):
    def make(source, *, kind=FunctionRewardOptions, name="score", **options):
        path = tmp_path / "users_async.py"
        path.write_text(textwrap.dedent(source))
        return make_scorer(kind(function=f"{path}:{name}", **options))

    return make


def rewards(scored):
    return [r.reward for r in scored.rollouts]


ROLLOUTS = [make_rollout(text, sample=i) for i, text in enumerate("abcdefg")]


@pytest.mark.parametrize(
    "kind, first", [(FunctionRewardOptions, ""), (SlimeRewardOptions, "args, ")], ids=["function", "slime"]
)
@pytest.mark.parametrize("limit, most", [(1, 1), (3, 3), (64, 7)])
def test_as_many_calls_run_at_once_as_the_limit_says(scorer_of, kind, first, limit, most):
    found = rewards(scorer_of(COUNTS.format(first), kind=kind, max_concurrent=limit)(ROLLOUTS))
    assert max(found) == most


def test_scores_come_in_the_order_of_the_rollouts_whichever_ends_first(scorer_of):
    source = """
    import asyncio
    async def score(rollout):
        await asyncio.sleep(0.01 * (7 - rollout.sample))
        return rollout.sample
    """
    assert rewards(scorer_of(source)(ROLLOUTS)) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


FAILS = """
async def score(rollout):
    if rollout.sample == 1:
        raise OSError("no answer")
    return {"a": 1.0, "b": 2.0}
"""


def test_one_that_fails_leaves_the_others_their_scores(scorer_of):
    assert rewards(scorer_of(FAILS, on_error="exclude")(ROLLOUTS[:3])) == [3.0, None, 3.0]
    zero = scorer_of(FAILS, on_error="zero")(ROLLOUTS[:3])
    assert rewards(zero) == [3.0, 0.0, 3.0]
    assert zero.rollouts[1].reward_parts == {"a": 0.0, "b": 0.0}
    assert zero.metrics["reward/num_errors"].value == 1
    with pytest.raises(RewardError, match=r"raised OSError: no answer for prompt row 0, sample 1"):
        scorer_of(FAILS)(ROLLOUTS[:3])


def test_a_call_that_was_cancelled_from_within_has_failed(scorer_of):
    source = "import asyncio\nasync def score(rollout):\n    raise asyncio.CancelledError"
    assert rewards(scorer_of(source, on_error="exclude")(ROLLOUTS[:2])) == [None, None]


def test_a_batched_function_may_be_async(scorer_of):
    source = """
    async def score(rollouts):
        if len(rollouts) == 1:
            raise OSError("no answer")
        return [len(rollouts) + r.sample for r in rollouts]
    """
    scorer = scorer_of(source, batched=True, on_error="zero")
    assert rewards(scorer(ROLLOUTS[:3])) == [3.0, 4.0, 5.0]
    assert rewards(scorer(ROLLOUTS[:1])) == [0.0]


def test_an_object_whose_call_is_async_and_a_token_reward_are_taken(scorer_of):
    source = """
    from strop.types import TokenRewards
    class Judge:
        async def __call__(self, rollout):
            return TokenRewards([0.5, 1.0])
    score = Judge()
    """
    (found,) = scorer_of(source)(ROLLOUTS[:1]).rollouts
    assert (found.reward, found.token_rewards) == (1.5, (None, None, 0.5, 1.0))


def test_calls_keep_one_loop_from_step_to_step_also_inside_a_running_loop(scorer_of):
    source = """
    import asyncio
    loops = set()
    async def score(rollout):
        loops.add(asyncio.get_running_loop())
        return len(loops)
    """
    scorer = scorer_of(source)

    async def twice():
        return [rewards(scorer(ROLLOUTS[:1])), rewards(scorer(ROLLOUTS[:1]))]

    assert asyncio.run(twice()) == [[1.0], [1.0]]


@pytest.mark.parametrize("word", ["async ", ""])
def test_progress_is_told_one_by_one(scorer_of, word):
    told = []
    scorer_of(f"{word}def score(rollout):\n    return 1")(ROLLOUTS, told.append)
    assert told == [1, 2, 3, 4, 5, 6, 7]


def test_a_limit_for_a_function_that_is_not_async_is_refused(scorer_of):
    with pytest.raises(RewardError, match=r"reward.max_concurrent cannot act: .*users_async.py:score is no async"):
        scorer_of("def score(rollout):\n    return 1", max_concurrent=3)


class SlowToCancel(Running):
    def cancel(self):
        super().cancel()
        time.sleep(0.02)


def test_of_several_that_are_cancelled_none_begins_in_the_place_of_another():
    began, is_there = [], threading.Event()

    async def forever(number):
        began.append(number)
        is_there.set()
        await asyncio.Event().wait()

    places = asyncio.Semaphore(1)
    running = [SlowToCancel([partial(forever, number)], places) for number in range(3)]
    assert is_there.wait(60)
    cancel(running)
    assert began == [0]
