"""Whole runs over several processes: the same numbers, resumed on another number of them, and ended when one is lost."""

import shutil
import signal
import time
from unittest.mock import patch

import pytest
import rank_processes
import torch
from commands.small_runs import metrics, read_lines, same_weights, small_once, strop, weights
from rank_processes import Breaks

from strop.runtime import ranks as of_rank_0
from strop.types import StropError, WaitError


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.fixture(autouse=True, scope="module")
def forked():
    """Ranks come from a process that has imported everything, which costs a tenth."""
    patch = pytest.MonkeyPatch()
    patch.setattr(of_rank_0, "start_process", rank_processes.start)
    yield
    patch.undo()


FLAGS = ("--num-steps", "4", "--lr", "1e-3", "--checkpoint-every-steps", "1", "--keep-checkpoints", "9", "--coef", "0.05")


def run(small, folder, num_processes, *flags):
    done = strop("train", small.train, *FLAGS, "--num-processes", num_processes, "--run.folder", folder, *flags)
    assert done.code == 0, done.err
    return folder


@pytest.fixture(scope="module")
def runs(small, tmp_path_factory):
    """The same run in one process and in two."""
    folder = tmp_path_factory.mktemp("ranks")
    return {n: run(small, folder / f"of_{n}", n, *small.eval_flags, "--eval.every_steps", "2") for n in (1, 2)}


def check_close(folder, other):
    """The same samples, and numbers up to the rounding of sums in another order."""
    for found, wanted in zip(metrics(folder), metrics(other), strict=True):
        assert found.keys() == wanted.keys()
        for name in wanted.keys() - {"padding_share", "logprob_gap", "logprob_gap_max"}:
            assert found[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-4), name
    found, wanted = weights(folder / "model"), weights(other / "model")
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5)


def test_two_processes_make_the_run_of_one(runs):
    check_close(runs[2], runs[1])
    for step in range(1, 5):
        rows = [read_lines(folder / f"rollouts/step_{step:06d}.jsonl") for folder in runs.values()]
        assert [row["tokens"] for row in rows[0]] == [row["tokens"] for row in rows[1]]
    assert same_weights(runs[2] / "best", runs[2] / "model") == same_weights(runs[1] / "best", runs[1] / "model")


@pytest.mark.parametrize("then, now", [(2, 2), (2, 1), (1, 2), (2, 3)])
def test_a_run_is_resumed_on_any_number_of_processes(small, runs, tmp_path, then, now):
    folder = tmp_path / "run"
    shutil.copytree(runs[then], folder)
    run(small, folder, now, *small.eval_flags, "--eval.every_steps", "2", "--resume", "step_000002")
    if now == then:
        assert metrics(folder) == metrics(runs[then])
        assert same_weights(folder / "model", runs[then] / "model")
    check_close(folder, runs[then])


# ---- ranks that are lost --------------------------------------------------------------------------------------------

STRIKES = """
import os
from pathlib import Path

def score(rollout):
    if rollout.group_id == {group} and rollout.sample == 0:
        os.kill(int(Path(__file__).with_name("pid").read_text()), {number})
    return len(rollout.text) / 9 + rollout.sample / 5
"""


def struck(small, tmp_path, number, *flags):
    """A run whose rank 1 is sent a signal while the answers of step 3 are scored."""
    scorer = tmp_path / "scorer.py"

    def start(variables):
        process = rank_processes.start(variables)
        (tmp_path / "pid").write_text(str(process.pid))
        return process

    scorer.write_text(STRIKES.format(group=2 * 4 + 1, number=int(number)))
    folder, began = tmp_path / "run", time.monotonic()
    flags = ("--reward.function", f"{scorer}:score", "--num-processes", "2", "--run.folder", folder, *flags)
    with patch.object(of_rank_0, "start_process", start):
        done = strop("train", small.train, *FLAGS, *flags)
    (tmp_path / "scorer.py").write_text(STRIKES.format(group=-1, number=0))
    return done, folder, time.monotonic() - began, flags


def test_a_killed_process_ends_the_run_with_its_name_and_the_run_can_go_on(small, tmp_path):
    done, folder, seconds, flags = struck(small, tmp_path, signal.SIGKILL)
    pid = rank_processes.started[-1].pid
    assert done.code == 1
    assert f"rank 1 (process {pid}) of the trainer was killed by SIGKILL. The step was not made." in done.err
    assert seconds < 30
    assert [row["step"] for row in metrics(folder)] == [1, 2]
    assert (folder / "checkpoints/step_000002").exists()
    again = strop("train", small.train, *FLAGS, *flags, "--resume")
    assert again.code == 0, again.err
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3, 4]
    check_close(folder, run(small, tmp_path / "whole", 1, *flags[:2]))


def test_a_process_that_hangs_ends_the_run_within_the_limit(small, tmp_path):
    done, folder, seconds, _ = struck(small, tmp_path, signal.SIGSTOP, "--process-timeout-s", "3")
    process = rank_processes.started[-1]
    assert done.code == 1
    assert f"rank 1 (process {process.pid}) of the trainer did not answer within trainer.process_timeout_s = 3 s" in done.err
    assert seconds < 40
    assert process.poll() == -signal.SIGKILL
    assert (folder / "model").exists()


def test_a_process_that_fails_says_why():
    with pytest.raises(StropError) as error, rank_processes.opened(3) as found:
        learner = found.make(Breaks, torch.nn.Linear(2, 2), by=2)
        assert learner.work() == 3
        learner.work(breaks=True)
    pid = rank_processes.started[-1].pid
    assert str(error.value) == f"rank 2 (process {pid}) of the trainer failed: MemoryError: no room for it"
    assert [process.poll() is None for process in rank_processes.started[-2:]] == [False, False]


def test_a_process_that_does_not_come_up_is_named(monkeypatch):
    def start(variables):
        return rank_processes.sleeping()

    monkeypatch.setattr(rank_processes, "start", start)
    with pytest.raises(WaitError, match=r"rank 1 \(process \d+\) of the trainer did not come up within"):
        with rank_processes.opened(2, process_timeout_s=0.2):
            pass
    assert rank_processes.started[-1].poll() is not None
