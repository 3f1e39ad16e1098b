"""Streaming, with an engine whose samples end when the test says: which groups a step takes, and what becomes of others."""

import asyncio
import signal
import threading
import time
import types

import pytest
from commands.small_runs import metrics, read_lines, small_once, strop

from strop.config import TrainConfig, make_config
from strop.observe.console import QuietConsole
from strop.rewards.scorer import Scorer, one_by_one
from strop.rollout import Filters
from strop.runtime.streaming import Streaming
from strop.types import Completion, FilterError, Metric, Prompt, WaitError

ROOT = {"model": {"path": "m"}, "data": {"kind": "jsonl", "path": "d"}, "reward": {"kind": "exact"}}
ALONE = {"advantage": {"kind": "reinforce_plus_plus"}}
ROLLOUT = {"prompts_per_step": 2, "group_size": 1, "max_off_policy_steps": 1, "streaming": True}


class Engine:
    """Each request waits until its prompt is answered, with versions of the test's choice."""

    def __init__(self):
        self.policy_version, self.asked, self.waiting = 0, [], {}

    async def generate(self, request):
        (row,) = request.prompt_tokens
        self.asked.append(row)
        self.waiting[row] = asyncio.get_running_loop().create_future()
        versions = await self.waiting[row]
        return [Completion((9,) * len(versions), (-0.5,) * len(versions), tuple(versions), "stop")]

    def answer(self, row, *versions):
        self.waiting.pop(row).set_result(versions or (self.policy_version,))

    async def update_weights(self, weights, policy_version):
        self.policy_version = policy_version
        return {"seconds/weights": Metric("sum", 0.5)}


class Cursor:
    """Row after row."""

    def __init__(self):
        self.position = 0

    def take(self, count):
        self.position += count
        return list(range(self.position - count, self.position))

    def observe(self, row, mean_reward):
        pass

    def metrics(self):
        return {}

    def state(self):
        return {"position": self.position}


def session_of(score=lambda rollout: float(rollout.prompt.row), num_steps=9, **tables):
    config = make_config(
        TrainConfig,
        ROOT | {"rollout": ROLLOUT, "algorithm": ALONE, "run": {"num_steps": num_steps}} | tables,
        {},
        file="x.toml",
    )
    return types.SimpleNamespace(
        config=config,
        console=QuietConsole(),
        loaded=None,
        prompts=[Prompt(row=row, tokens=(row,), text="") for row in range(99)],
        cursor=Cursor(),
        scorer=Scorer(one_by_one(score, "score"), "score"),
        filters=Filters(config.filter),
        engine=Engine(),
        decode=lambda tokens: "",
        recorded=None,
        step=0,
        num_prompts_sampled=0,
        has_told_of_group_of_one=False,
        has_told_of_added_rewards=False,
        waiting=(),
        owed=(),
        ahead=(),
        counts={},
        guards=types.SimpleNamespace(wants_checkpoint=False),
        trainer=types.SimpleNamespace(num_steps=0),
        weights=list,
        publish=lambda: None,
        place=None,
    )


def streamed(story, **options):
    """Run a story of a session, its engine and its collector."""

    async def work():
        session = session_of(**options)
        collector = Streaming(session)
        try:
            async with asyncio.timeout(100):
                await collector.start()
                return await story(session, session.engine, collector)
        finally:
            await collector.close()

    return asyncio.run(work())


async def settled():
    """Everything that can go on has gone on."""
    for _ in range(30):
        await asyncio.sleep(0)


async def make_step(session, collector):
    session.step += 1
    session.trainer.num_steps += 1
    return await collector.share(holds=False)


def rows(taken):
    return [rollout.prompt.row for rollout in taken[0]]


def values(taken):
    return {name: metric.value for name, metric in taken[1].items()}


def test_a_step_takes_the_groups_that_are_complete_and_the_late_one_joins_the_next():
    """Two prompts a step, one step ahead: four are begun. 0 is late, and step 1 starts with 1 and 2."""

    async def story(session, engine, collector):
        await settled()
        assert engine.asked == [0, 1, 2, 3]
        engine.answer(2)
        engine.answer(1)
        first = await collector.take()
        assert (rows(first), [r.group_id for r in first[0]]) == ([1, 2], [0, 1])
        found = values(first)
        assert (found["staleness"], found["queue/groups_in_flight"], found["queue/ready_groups"]) == (0, 2, 0)
        assert found["reward"] == 1.5  # of 1 and 2
        assert (await make_step(session, collector))["seconds/weights"].value == 0.5
        await settled()
        assert engine.asked == [0, 1, 2, 3, 4, 5]
        engine.answer(0, 0, 0, 1)  # begun by version 0, ended by 1
        engine.answer(4)
        second = await collector.take()
        assert (rows(second), [r.group_id for r in second[0]]) == ([0, 4], [2, 3])
        found = values(second)
        assert (found["staleness"], found["staleness_max"]) == (0.5, 1)
        assert (found["mixed_versions"], found["older_tokens"]) == (0.5, 2 / 4)
        assert found["dropped/stale"] == 0

    streamed(story)


def test_a_group_that_is_too_old_is_dropped_and_counted_and_another_prompt_takes_its_place():
    """0 and 1 are of version 0; when they are complete the policy is at version 2, and one step is what may be between."""

    async def story(session, engine, collector):
        await settled()
        for _ in (1, 2):
            [engine.answer(row) for row in sorted(engine.waiting)[2:4]]
            await collector.take()
            await make_step(session, collector)
            await settled()
        assert sorted(engine.waiting) == [0, 1, 6, 7]
        engine.answer(0, 0)
        engine.answer(1, 0, 2)
        engine.answer(6)
        taking = asyncio.create_task(collector.take())
        await settled()
        assert sorted(engine.waiting) == [7, 8, 9]
        engine.answer(9)
        third = await taking
        assert rows(third) == [6, 9]
        assert values(third)["dropped/stale"] == 2
        assert values(third)["reward"] == pytest.approx((0 + 1 + 6 + 9) / 4)  # all that was scored since the last step
        assert values(third)["staleness_max"] == 0

    streamed(story)


def test_a_rollout_of_version_3_that_is_trained_on_at_version_5_is_2_steps_old():
    async def story(session, engine, collector):
        session.trainer.num_steps = 5
        await settled()
        engine.answer(0, 3, 3)
        engine.answer(1, 3, 5)
        found = values(await collector.take())
        assert (found["staleness"], found["staleness_max"]) == (2, 2)

    streamed(story, rollout=ROLLOUT | {"max_off_policy_steps": 2})


def test_who_cancels_during_a_step_is_heard_after_it_though_everything_is_ready_for_the_next():
    async def story(session, engine, collector):
        made, begun, may_end = [], threading.Event(), threading.Event()

        def train():
            begun.set()
            may_end.wait(60)

        async def loop():
            for step in range(4):
                await collector.take()
                await collector.train(train)
                made.append(step)
                await make_step(session, collector)

        await settled()
        [engine.answer(row) for row in list(engine.waiting)]
        await settled()
        task = asyncio.create_task(loop())
        while not begun.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.wait([task])
        assert task.cancelled()
        assert made == [0]

    streamed(story, rollout=ROLLOUT | {"max_off_policy_steps": 3})


def test_no_more_is_begun_than_the_steps_that_are_left_take():
    async def story(session, engine, collector):
        await settled()
        assert engine.asked == [0, 1, 2, 3, 4, 5]  # not the eight that three steps ahead allow
        for _ in range(3):
            [engine.answer(row) for row in sorted(engine.waiting)[:2]]
            await collector.take()
            await make_step(session, collector)
            await settled()
        assert engine.asked == [0, 1, 2, 3, 4, 5]

    streamed(story, num_steps=3, rollout=ROLLOUT | {"max_off_policy_steps": 3})


def test_a_checkpoint_holds_the_groups_that_are_complete_and_the_prompts_that_are_not():
    async def story(session, engine, collector):
        await settled()
        engine.answer(0)
        engine.answer(1)
        await collector.take()
        await make_step(session, collector)
        await settled()
        engine.answer(4)
        await settled()
        collector.mark_place()
        place = session.place
        assert [group.prompt.row for group in place.waiting] == [4]
        assert place.owed == ((2, 2), (3, 3), (5, 5))
        assert (place.cursor, place.num_prompts_sampled) == ({"position": 6}, 6)
        return place

    place = streamed(story)

    async def goes_on(session, engine, collector):
        await settled()
        assert engine.asked == [2, 3, 5]
        engine.answer(2)
        assert rows(await collector.take()) == [2, 4]
        await make_step(session, collector)
        await settled()
        assert engine.asked == [2, 3, 5, 6, 7]

    async def work():
        session = session_of()
        session.cursor.position, session.num_prompts_sampled, session.step = 6, 6, 1
        session.waiting, session.owed, session.counts = place.waiting, place.owed, place.counts
        collector = Streaming(session)
        await collector.start()
        await goes_on(session, session.engine, collector)
        await collector.close()

    asyncio.run(work())


def test_filters_that_keep_nothing_end_the_run_with_their_counts():
    async def story(session, engine, collector):
        taking = asyncio.create_task(collector.take())
        while not taking.done():
            await settled()
            [engine.answer(row) for row in list(engine.waiting)]
        with pytest.raises(FilterError, match=r"max_rounds must be enough to fill a step, got 3: .* no_reward \d"):
            await taking

    streamed(story, score=lambda rollout: None, filter={"rollout": "builtins:callable", "max_rounds": 3})


def test_an_engine_that_finishes_nothing_is_not_waited_for_for_ever():
    async def story(session, engine, collector):
        with pytest.raises(WaitError, match="0 of 4 samples are there, none or not all of prompt rows 0, 1, 2, 3"):
            await collector.take()

    streamed(story, rollout=ROLLOUT | {"timeout_s": 0.02})


def test_an_error_of_the_scorer_is_raised_where_the_next_step_is_asked_for():
    def score(rollout):
        return float("nan")

    async def story(session, engine, collector):
        await settled()
        engine.answer(0)
        with pytest.raises(ValueError, match="must return a finite number"):
            await collector.take()

    streamed(story, score=score)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


def test_an_error_ends_the_run_though_scorers_are_at_work(small, tmp_path):
    """Everything beyond the first batch is scored for minutes: the error that ends the step does not wait for that."""
    (tmp_path / "reward.py").write_text(
        "import asyncio\n\nasync def score(rollout):\n    if rollout.group_id > 3:\n        await asyncio.sleep(300)\n"
        "    return 1e68 * (rollout.sample == 1)\n"
    )
    flags = ("--max-off-policy-steps", 2, "--streaming", "--normalize-std", "false")
    flags = (*flags, "--reward.function", f"{tmp_path}/reward.py:score", "--reward.timeout_s", 300)
    began = time.monotonic()
    done = strop("train", small.train, *flags, "--run.folder", tmp_path / "run")
    assert "not finite" in done.err
    assert time.monotonic() - began < 250


STOPPING = """
import os, signal
from pathlib import Path

def score(rollout):
    flag = Path({flag!r})
    if rollout.group_id == 14 and flag.exists():
        flag.unlink()
        os.kill(os.getpid(), signal.SIGINT)
    return len(set(rollout.tokens[-3:])) / 3
"""


def test_ctrl_c_loses_no_prompt_and_trains_on_none_twice(small, tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    flag = tmp_path / "flag"
    flag.touch()
    (tmp_path / "reward.py").write_text(STOPPING.format(flag=str(flag)))
    scored = ("--reward.function", f"{tmp_path}/reward.py:score", "--reward.num_workers", 0)
    flags = ("--max-off-policy-steps", 4, "--streaming", "--num-steps", 6, "--checkpoint-every-steps", 50, *scored)
    run = tmp_path / "run"
    try:
        done = strop("train", small.train, *flags, "--run.folder", run)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.code == 130, done
    assert len(metrics(run)) < 6
    done = strop("train", small.train, *flags, "--run.folder", run, "--resume")
    assert done.code == 0, done.err
    asked = [row["prompt_row"] for n in range(1, 7) for row in read_lines(run / f"rollouts/step_{n:06d}.jsonl")[::4]]
    assert strop("train", small.train, "--num-steps", 6, *scored, "--run.folder", tmp_path / "in_turn").code == 0
    files = [tmp_path / f"in_turn/rollouts/step_{n:06d}.jsonl" for n in range(1, 7)]
    assert sorted(asked) == sorted(row["prompt_row"] for file in files for row in read_lines(file)[::4])


def test_a_run_that_streams_trains_on_each_prompt_once_and_says_how_old_its_tokens_are(small, tmp_path):
    flags = ("--max-off-policy-steps", 4, "--streaming", "--num-steps", 5, "--run.folder", tmp_path / "run")
    done = strop("train", small.train, *flags)
    assert done.code == 0, done.err
    found = metrics(tmp_path / "run")
    assert len(found) == 5
    assert all(row["staleness_max"] <= 4 for row in found)
    assert sum(row["dropped/stale"] for row in found) == 0
