"""Groups are scored while others are sampled, and it shows in nothing but the time."""

import asyncio
import gc
import os
import textwrap
import threading
import time

import pytest
from written_rollouts import make_rollout

from strop.config.sampling import CodeRewardOptions, FunctionRewardOptions, MathRewardOptions, SlimeRewardOptions
from strop.rewards import arrivals, make_scorer
from strop.rewards.pool import Pool
from strop.types import RewardError

USERS = """
import asyncio, os, time
from pathlib import Path

HERE = Path(__file__).parent
CALLS = []

def score(rollout):  # of the calls before it, too: one worker makes them
    CALLS.append(rollout.text)
    if rollout.text == "wait":
        while not (HERE / "go").exists():
            time.sleep(0.01)
    (HERE / f"scored-{rollout.text}").touch()
    if rollout.text == "bad":
        raise KeyError("no such tool")
    return {"length": len(rollout.text), "calls": len(CALLS)}

async def meet(rollout):  # ends when all four have begun
    (HERE / f"met-{rollout.text}").touch()
    while len(list(HERE.glob("met-*"))) < 4:
        await asyncio.sleep(0.01)
    return len(rollout.text)

async def one_ends(rollout):
    if rollout.text == "exit":
        await asyncio.sleep(0.2)
        os._exit(3)
    await asyncio.sleep(0.3)
    return len(rollout.text)

async def number(args, sample):
    return sample.index

def of_all(rollouts):
    return [len(rollouts)] * len(rollouts)
"""


@pytest.fixture
def scorer_of(tmp_path):
    made = []

    def make(name, *, kind=FunctionRewardOptions, **options):
        (tmp_path / "users.py").write_text(textwrap.dedent(USERS))
        made.append(make_scorer(kind(function=f"{tmp_path}/users.py:{name}", **options)))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


def groups_of(*texts):
    return [[make_rollout(text, row=row, sample=i) for i, text in enumerate(group)] for row, group in enumerate(texts)]


def score_ahead(scorer, groups, order=None, between=lambda: None):
    """Put the groups in an order of their places."""

    async def work():
        with scorer.ahead(lambda done: None) as ahead:
            for place in order or range(len(groups)):
                ahead.put(place, groups[place])
                between()
            return await ahead.scored()

    return asyncio.run(work())


def wait_for(path):
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.01)


def test_a_group_is_scored_before_the_next_one_is_there(scorer_of, tmp_path):
    groups = groups_of(("a", "bb"), ("ccc", "d"))
    scored = score_ahead(scorer_of("score"), groups[:1], between=lambda: wait_for(tmp_path / "scored-bb"))
    assert [rollout.reward_parts["length"] for rollout in scored.rollouts] == [1, 2]


def test_nothing_is_waited_for_where_all_are_scored_before_it_is_said_that_they_were_all(
    scorer_of, monkeypatch, tmp_path
):
    groups, ended, is_over, listen = groups_of(("a", "bb")), threading.Event(), [], Pool._listen

    def listened(pool, round_):
        is_over.append(round_.is_over)
        listen(pool, round_)
        if round_.calls and not round_.left:  # this thread goes on once the other has said it
            assert ended.wait(60)

    def end(self, plain=arrivals.Arrivals.end):
        wait_for(tmp_path / "scored-bb")
        plain(self)
        ended.set()

    scorer = scorer_of("score")
    monkeypatch.setattr(Pool, "_listen", listened)
    monkeypatch.setattr(arrivals.Arrivals, "end", end)
    assert len(score_ahead(scorer, groups).rollouts) == 2
    assert is_over
    assert not any(is_over)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_a_function_sees_what_it_would_see_if_all_were_there_whichever_group_is_sampled_first(scorer_of, order):
    groups = groups_of(("a", "bb"), ("bad", "ccc"), ("d",))
    found = [scorer_of("score", num_workers=1, on_error="zero") for _ in range(2)]
    plain = found[0]([rollout for group in groups for rollout in group])
    ahead = score_ahead(found[1], groups, order)
    assert ahead == plain
    assert [r.reward_parts["calls"] for r in ahead.rollouts] == [1, 2, 0, 4, 5]


def test_calls_of_an_async_function_run_beside_those_of_groups_that_came_before(scorer_of, tmp_path):
    groups = groups_of(("a", "bb"), ("ccc", "dddd"))
    scorer = scorer_of("meet", timeout_s=100)
    scored = score_ahead(scorer, groups, between=lambda: wait_for(tmp_path / "met-a"))
    assert [rollout.reward for rollout in scored.rollouts] == [1, 2, 3, 4]


def test_where_an_async_call_ends_its_worker_those_of_other_groups_still_score(scorer_of):
    groups = groups_of(("a",), ("exit",), ("bb", "ccc"))
    scored = score_ahead(scorer_of("one_ends", on_error="exclude"), groups, between=lambda: time.sleep(0.05))
    assert [rollout.reward for rollout in scored.rollouts] == [1, None, 2, 3]
    assert scored.metrics["reward/num_crashes"].value == 1


def test_numbers_of_samples_go_on_whether_or_not_they_are_scored_ahead(scorer_of):
    scorer, groups = scorer_of("number", kind=SlimeRewardOptions), groups_of(("a", "b"), ("c", "d"))
    flat = [rollout for group in groups for rollout in group]
    with scorer.ahead(lambda done: None) as ahead:  # of a step that was not sampled to its end
        ahead.put(0, groups[0])
    found = [score_ahead(scorer, groups, (1, 0)), scorer(flat), score_ahead(scorer, groups)]
    assert [r.reward for scored in found for r in scored.rollouts] == list(range(12))


def test_a_batched_function_gets_all_of_them_at_once(scorer_of):
    groups = groups_of(("a", "b"), ("c",))
    scored = score_ahead(scorer_of("of_all", batched=True), groups, between=lambda: time.sleep(0.3))
    assert [rollout.reward for rollout in scored.rollouts] == [3, 3, 3]


def test_a_failure_that_ends_the_run_ends_it_before_the_rest_is_sampled(scorer_of, tmp_path):
    groups = groups_of(("bad",), ("a",))
    with scorer_of("score").ahead(lambda done: None) as ahead:

        def sample_all():
            ahead.put(0, groups[0])  # which may hear of it already
            wait_for(tmp_path / "scored-bad")
            for _ in range(6000):  # soon after that at the latest
                ahead.put(1, groups[1])
                time.sleep(0.01)

        with pytest.raises(RewardError, match=r"KeyError.* for prompt row 0, sample 0"):
            sample_all()


def test_what_nobody_waits_for_any_more_is_ended_and_the_scorer_scores_on(scorer_of, tmp_path):
    scorer, groups = scorer_of("score"), groups_of(("wait",), ("a",))
    began = time.monotonic()
    with scorer.ahead(lambda done: None) as ahead:
        ahead.put(0, groups[0])
        time.sleep(0.2)
    assert time.monotonic() - began < 60  # the call would go on for ever
    assert score_ahead(scorer, groups_of(("bb",))).rollouts[0].reward_parts["length"] == 2


def test_nothing_stays_open(scorer_of):
    scorer, groups = scorer_of("score", num_workers=1), groups_of(("a",), ("b",))
    score_ahead(scorer, groups)
    before = len(os.listdir("/proc/self/fd"))
    score_ahead(scorer, groups)
    assert len(os.listdir("/proc/self/fd")) == before


def test_programs_are_run_ahead_with_the_same_scores_and_counts():
    label = ["assert f(1) == 2"]
    texts = ("def f(x): return x + 1", "def f(x): return x", "f = ", "def f(x): return x + 1")
    groups = [[make_rollout(text, label=label, row=row)] for row, text in enumerate(texts)]
    scorer = make_scorer(CodeRewardOptions(timeout_s=5.0))
    try:
        plain = scorer([rollout for group in groups for rollout in group])
        with scorer.ahead(lambda done: None) as ahead:  # stopped: counted nowhere
            ahead.put(0, groups[1])
        assert score_ahead(scorer, groups, (3, 0, 2, 1)) == plain
        assert [rollout.reward for rollout in plain.rollouts] == [1, 0, 0, 1]
    finally:
        scorer.close()


def test_what_this_process_scores_waits_until_all_are_there():
    with make_scorer(MathRewardOptions()).ahead(lambda done: None) as ahead:
        assert ahead is None


def test_a_run_that_is_stopped_while_it_waits_for_scores_says_nothing_of_them(scorer_of, caplog):
    scorer, groups = scorer_of("score"), groups_of(("wait",))

    async def work():
        with scorer.ahead(lambda done: None) as ahead:
            ahead.put(0, groups[0])
            await ahead.scored()

    async def stopped():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(work(), timeout=0.3)

    asyncio.run(stopped())
    gc.collect()
    assert caplog.records == []
