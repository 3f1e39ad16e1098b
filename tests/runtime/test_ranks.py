"""Whole runs over several processes: the same numbers, resumed on another number of them, and ended when one is lost."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import rank_processes
import tiny_models
import torch
from commands.small_runs import ENVIRONMENT, metrics, read_lines, same_weights, small_once, strop, weights
from forked import running
from processes import is_running
from rank_processes import Breaks, forked_ranks  # noqa: F401 - a fixture of this file

from strop.config import TorchTrainerOptions
from strop.runtime import ranks as of_rank_0
from strop.trainers import TorchTrainer
from strop.types import LostRankError, StropError, UserError, WaitError

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


# AdamW makes a step of up to the learning rate of a gradient that is all rounding; adam_eps keeps it small
SHORT = ("--num-steps", "4", "--lr", "1e-3", "--adam-eps", "1e-5", "--coef", "0.05")
CHECKPOINTS = ("--checkpoint-every-steps", "1", "--keep-checkpoints", "9")
FLAGS = (*SHORT, *CHECKPOINTS)


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


def test_a_run_goes_on_with_its_layers_divided_and_then_its_rows_or_nothing(small, runs, tmp_path):
    flags, divided = (*small.eval_flags, "--eval.every_steps", "2"), ("--tensor-parallel", "2")

    def goes_on(then, name, step, *more):
        folder = tmp_path / name
        shutil.copytree(then, folder)
        return run(small, folder, *more, *flags, "--resume", f"step_{step:06d}")

    first = goes_on(runs[1], "divided", 1, 2, *divided)
    again = goes_on(first, "again", 3, 2, *divided)
    assert metrics(again) == metrics(first)
    assert same_weights(again / "model", first / "model")
    for folder in (first, goes_on(first, "alone", 2, 1), goes_on(first, "rows", 2, 2, "--context-parallel", "2")):
        check_close(folder, runs[1])


def test_a_model_that_cannot_be_divided_is_refused(small, tmp_path):
    for flags, reason in (
        (("--num-processes", "3", "--tensor-parallel", "3"), "trainer.tensor_parallel must divide num_attention_heads"),
        (
            ("--num-processes", "3", "--tensor-parallel", "2"),
            "trainer.tensor_parallel must divide trainer.num_processes = 3, got 2",
        ),
        (
            ("--num-processes", "2", "--tensor-parallel", "2", "--context-parallel", "2"),
            "trainer.context_parallel must, times trainer.tensor_parallel = 2, divide trainer.num_processes = 2, got 2",
        ),
        (
            ("--num-processes", "2", "--context-parallel", "2", "--layout", "packed"),
            "trainer.layout must be padded or auto with trainer.context_parallel = 2, got packed",
        ),
        (("--tensor-parallel", "2"), "trainer.tensor_parallel must divide trainer.num_processes = 1, got 2"),
        (
            ("--num-processes", "2", "--tensor-parallel", "2", "--lora.rank", "2"),
            "trainer.tensor_parallel must be 1 with lora.rank = 2, got 2",
        ),
    ):
        done = strop("train", small.train, *flags, "--run.folder", tmp_path / "run")
        assert (done.code, reason in done.err) == (2, True), done
        assert not (tmp_path / "run").exists()


def test_a_step_of_two_processes_is_redone_to_the_bit(runs, tmp_path):
    done = strop("replay", runs[2], "--step", "3")
    assert done.code == 0, done.err
    assert strop("replay", runs[2], "--step", "3", "--num-processes", "1").code == 1  # sums in another order


def test_fine_tuning_in_two_processes_is_that_of_one(small, tmp_path):
    held_out = ("--validation.data.path", small.folder / "demonstrations.jsonl", "--validation.every_steps", "2")
    for n in (1, 2):
        flags = ("--num-processes", n, "--lr", "1e-3", *held_out, "--run.folder", tmp_path / str(n))
        done = strop("sft", small.sft, *flags)
        assert done.code == 0, done.err
    check_close(tmp_path / "2", tmp_path / "1")
    found, wanted = (weights(tmp_path / n / "best") for n in "21")
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5)


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
        done = strop("train", small.train, *SHORT, *flags)
    (tmp_path / "scorer.py").write_text(STRIKES.format(group=-1, number=0))
    return done, folder, time.monotonic() - began, flags


def test_a_killed_process_ends_the_run_with_its_name_and_the_run_can_go_on(small, tmp_path):
    done, folder, seconds, flags = struck(small, tmp_path, signal.SIGKILL, *CHECKPOINTS)
    pid = rank_processes.started[-1].pid
    assert done.code == 1
    assert f"rank 1 (process {pid}) of the trainer was killed by SIGKILL. The step was not made." in done.err
    assert seconds < 300  # process_timeout_s is 600
    assert [row["step"] for row in metrics(folder)] == [1, 2]
    assert (folder / "checkpoints/step_000002").exists()
    again = strop("train", small.train, *SHORT, *flags, "--resume")
    assert again.code == 0, again.err
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3, 4]
    check_close(folder, run(small, tmp_path / "whole", 1, *flags[:2]))


def test_a_process_that_hangs_ends_the_run_within_the_limit(small, tmp_path):
    flags = ("--process-timeout-s", "5", "--checkpoint-every-steps", "3")  # none is there, and none can be made
    done, folder, seconds, _ = struck(small, tmp_path, signal.SIGSTOP, *flags)
    process = rank_processes.started[-1]
    assert done.code == 1
    assert (
        f"rank 1 (process {process.pid}) of the trainer did not answer within trainer.process_timeout_s = 5 s"
        in done.err
    )
    assert seconds < 300
    assert process.poll() == -signal.SIGKILL
    assert (folder / "model").exists()


def test_a_process_that_is_late_within_a_layer_is_named():
    """Rank 0 waits for it in a group of two of the four."""
    began = time.monotonic()
    with rank_processes.opened(4, process_timeout_s=4.0, tensor_parallel=2) as found:
        learner = found.make(rank_processes.Late, tiny_models.llama())
        learner.read(seconds=0)
        with pytest.raises(LostRankError, match=r"^rank 1 \(process \d+\) of the trainer did not answer"):
            learner.read(seconds=300)
    assert time.monotonic() - began < 200


def test_a_process_that_fails_says_why():
    with rank_processes.opened(3) as found:
        learner = found.make(Breaks, torch.nn.Linear(2, 2), by=2)
        assert learner.work() == 3
        with pytest.raises(StropError) as error:
            learner.work(breaks=True)
    pid = rank_processes.started[-1].pid
    assert str(error.value) == f"rank 2 (process {pid}) of the trainer failed: MemoryError: no room for it"
    assert [process.poll() is None for process in rank_processes.started[-2:]] == [False, False]


def test_what_a_model_cannot_do_is_refused_in_the_words_of_one_process():
    options = TorchTrainerOptions(layout="packed")
    with rank_processes.opened(2) as found, pytest.raises(UserError) as error:
        found.make(TorchTrainer, tiny_models.opt(), options, total_steps=1)
    assert str(error.value).startswith("trainer.layout must be padded or auto for OPTForCausalLM, got packed: ")


def test_a_process_that_does_not_come_up_is_named(monkeypatch):
    def start(variables):
        return rank_processes.sleeping()

    monkeypatch.setattr(rank_processes, "start", start)
    began = time.monotonic()
    with (
        pytest.raises(WaitError, match=r"rank 1 \(process \d+\) of the trainer did not come up within"),
        rank_processes.opened(2, process_timeout_s=0.2),
    ):
        pass
    assert rank_processes.started[-1].poll() == -signal.SIGKILL
    assert time.monotonic() - began < 50  # it sleeps for 60 s


INTERRUPTS = """
import os, signal
from pathlib import Path

def score(rollout):
    if rollout.group_id == 9 and rollout.sample == 0:
        for pid in Path(__file__).with_name("pids").read_text().split():
            os.kill(int(pid), signal.SIGINT)
    return rollout.sample / 5
"""


def test_ctrl_c_ends_the_run_after_a_step_with_everything_saved(small, tmp_path):
    """A terminal sends it to every process of a run."""
    (tmp_path / "scorer.py").write_text(INTERRUPTS)

    def start(variables):
        process = rank_processes.start(variables)
        (tmp_path / "pids").write_text(f"{os.getpid()} {process.pid}")
        return process

    flags = ("--reward.function", f"{tmp_path}/scorer.py:score", "--run.folder", tmp_path / "run")
    with patch.object(of_rank_0, "start_process", start):
        done = strop("train", small.train, *FLAGS, "--num-processes", "2", *flags)
    assert done.code == 130, done
    assert (rank_processes.started[-1].poll(), "lost" in done.err) == (0, False)
    last = metrics(tmp_path / "run")[-1]["step"]
    assert last in (2, 3)
    assert (tmp_path / f"run/checkpoints/step_{last:06d}").exists()
    assert (tmp_path / "run/model").exists()


def test_no_process_outlives_the_one_that_started_it_even_one_that_hangs(tmp_path):
    code = (
        "import time, torch; from strop.config import TorchTrainerOptions; from strop.runtime.ranks import open_ranks\n"
        "with open_ranks(TorchTrainerOptions(num_processes=2), device=torch.device('cpu')) as ranks:\n"
        "    print('up', flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=ENVIRONMENT)
    try:
        assert parent.stdout.readline() == b"up\n"
        (child,) = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGSTOP)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    until = time.monotonic() + 60
    while is_running(int(child)):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_processes_of_a_launcher_join_the_run_that_rank_0_writes(small, runs, tmp_path, monkeypatch):
    """As torchrun starts them: the same command in each, told apart by variables."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    flags = (*FLAGS, *small.eval_flags, "--eval.every_steps", "2")
    other = running("train", small.train, *flags, "--run.folder", tmp_path / "other", RANK="1", **variables)
    for name, value in {**variables, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    done = strop("train", small.train, *flags, "--run.folder", tmp_path / "run")
    assert done.code == 0, done.err
    assert other.wait(100) == 0
    assert not (tmp_path / "other").exists()
    assert metrics(tmp_path / "run") == metrics(runs[2])


def test_another_number_of_processes_than_were_launched_is_refused(small, tmp_path, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    done = strop("train", small.train, "--num-processes", "2", "--run.folder", tmp_path / "run")
    assert done.code == 2
    assert (
        "trainer.num_processes must be 3, the number of processes that were launched, or be left out, got 2" in done.err
    )
