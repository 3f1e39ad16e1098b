"""Waits through the real command: an engine and a scorer that do not answer end with the reason, and nothing is lost."""

import asyncio
import time

import pytest
from commands.small_runs import metrics, read_lines, same_weights, small_once, strop
from forked import Command
from processes import is_running

from strop.engines import TorchEngine


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.mark.parametrize("how", ["hangs", "gives nothing"])
def test_an_engine_that_does_not_answer_ends_the_run_with_everything_saved(small, tmp_path, monkeypatch, how):
    """From the third step on, of one prompt of four."""
    number, generate = 0, TorchEngine.generate

    async def disturbed(self, request):
        nonlocal number
        number += 1
        if number == 11:
            await asyncio.sleep(0 if how == "gives nothing" else 1000)
            return []
        return await generate(self, request)

    monkeypatch.setattr(TorchEngine, "generate", disturbed)
    flags = ("--num-steps", "4", "--rollout.timeout_s", "4", "--checkpoint-every-steps", "4")
    run = tmp_path / "run"
    done = strop("train", small.train, *flags, "--run.folder", run)
    assert done.code == 1, done
    assert "Traceback" not in done.err
    says = {
        "hangs": "stopped: rollout.timeout_s = 4 s went by in which the engine finished no prompt: 12 of 16 samples are there",
        "gives nothing": "stopped: the engine must give 4 samples of prompt row ",
    }
    assert says[how] in done.err
    assert [row["step"] for row in read_lines(run / "metrics.jsonl")] == [1, 2]
    monkeypatch.undo()
    flags = (*flags[:2], "--checkpoint-every-steps", "4")  # the limit may be another one
    assert strop("train", small.train, *flags, "--run.folder", run, "--resume").code == 0
    assert strop("train", small.train, *flags, "--run.folder", tmp_path / "whole").code == 0
    assert metrics(run) == metrics(tmp_path / "whole")
    assert same_weights(run / "model", tmp_path / "whole/model")


def test_scorers_that_are_stopped_are_counted_on_the_line_of_the_step_and_in_the_metrics(small, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "def score(rollout):\n"
        "    if rollout.group_id == 0 and rollout.sample == 0:\n        os._exit(1)\n"
        "    while rollout.group_id == 1 and rollout.sample == 0:\n        pass\n"
        "    return len(rollout.text) / 8 + rollout.sample\n"
    )
    flags = ("--reward.function", f"{tmp_path}/mine.py:score", "--reward.timeout_s", "1", "--on-error", "exclude")
    done = strop("train", small.train, *flags, "--num-steps", "1", "--run.folder", tmp_path / "run")
    assert done.code == 0, done
    (row,) = metrics(tmp_path / "run")
    names = ("reward/num_errors", "reward/num_timeouts", "reward/num_crashes", "reward/num_out_of_memory")
    assert [row[name] for name in names] == [2, 1, 1, 0]
    assert "scorer errors 2  timeouts 1  crashes 1  left out 2" in done.out
    found = read_lines(tmp_path / "run/rollouts/step_000001.jsonl")
    assert sorted(r["excluded"] for r in found if r["excluded"]) == ["scorer_crash", "scorer_timeout"]


def test_a_scorer_that_hangs_stops_the_run_with_rollout_and_option(small, tmp_path):
    (tmp_path / "mine.py").write_text("def score(rollout):\n    while True:\n        pass\n")
    flags = ("--reward.function", f"{tmp_path}/mine.py:score", "--reward.timeout_s", "0.3")
    done = strop("train", small.train, *flags, "--run.folder", tmp_path / "run")
    assert done.code == 2
    assert "did not end within reward.timeout_s = 0.3 s and was stopped for prompt row " in done.err


JUDGE = """
import os, time
def score(rollout):
    open("{pids}/" + str(os.getpid()), "w").close()
    print("judging", flush=True)
    time.sleep({seconds})
    return float(rollout.sample)
"""


@pytest.mark.parametrize("ends", ["by itself", "kill -9"])
def test_however_a_run_ends_no_worker_is_left(small, tmp_path, ends):
    """After Ctrl-C neither: see test_interrupts.py."""
    pids = tmp_path / "pids"
    pids.mkdir()
    (tmp_path / "judge.py").write_text(JUDGE.format(pids=pids, seconds=0.05 if ends == "by itself" else 300))
    flags = ("--reward.function", f"{tmp_path}/judge.py:score", "--num-steps", "1", "--run.folder", tmp_path / "run")
    if ends == "by itself":
        assert strop("train", small.train, *flags).code == 0
    else:
        with Command(tmp_path, "train", small.train, *flags) as command:
            command.until("judging")
            command.kill()
    names = [int(path.name) for path in pids.iterdir()]
    assert names
    until = time.monotonic() + 60
    while any(map(is_running, names)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(is_running, names))
