"""Whole runs on a cluster: the numbers of a run without one, actors that are lost, and a run that is asked to stop."""

import os
import signal
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from commands.small_runs import metrics, same_weights, strop, without_times
from real_ray.cluster_runs import run

from strop.runtime.cluster import driver

SAVES = ("--checkpoint-every-steps", "1", "--keep-checkpoints", "9")

STRIKES = """
import os
from pathlib import Path

struck = Path(__file__).with_name("struck")

def score(rollout):
    if rollout.group_id == 9 and rollout.sample == 0 and not struck.exists():
        struck.touch()
        os.kill(int(struck.with_name("pid").read_text()), {number})
    return sum(letter in "abcd" for letter in rollout.text) / 8 + 0.5 * (rollout.finish_reason == "stop")
"""


def check_same(folder, other):
    assert without_times(metrics(folder)) == without_times(metrics(other))
    assert same_weights(folder / "model", other / "model")


@pytest.fixture(scope="module")
def alone(small, tmp_path_factory):
    """The same run without a cluster, in one process and in two."""
    folder = tmp_path_factory.mktemp("alone")
    for size in (1, 2):
        run(small, folder / f"of_{size}", "--num-processes", size)
    return {size: folder / f"of_{size}" for size in (1, 2)}


def test_one_rank_makes_the_run_of_one_process_bit_for_bit(cluster, small, alone, tmp_path):
    run(small, tmp_path / "run", "--cluster", "auto")
    check_same(tmp_path / "run", alone[1])


def test_fine_tuning_on_a_cluster_is_that_of_two_processes(cluster, small, tmp_path):
    flags = ("--num-steps", "3", "--num-processes", "2", "--run.folder")
    for folder, more in ((tmp_path / "run", ("--cluster", "auto")), (tmp_path / "alone", ())):
        done = strop("sft", small.sft, *flags, folder, *more)
        assert done.code == 0, done
    check_same(tmp_path / "run", tmp_path / "alone")


def struck(small, tmp_path, rank, number, *flags, code=0):
    """A run of two ranks of which one is sent a signal, once, while the answers of step 3 are scored."""
    scorer = tmp_path / "scorer.py"
    scorer.write_text(STRIKES.format(number=int(number)))
    pids, variables = [], driver._Driver._variables

    def seen(self):
        pids.append(self._places[rank].pid)
        (tmp_path / "pid").write_text(str(pids[-1]))
        return variables(self)

    flags = ("--reward.function", f"{scorer}:score", "--num-processes", "2", "--cluster", "auto", *flags)
    with patch.object(driver._Driver, "_variables", seen):
        done = run(small, tmp_path / "run", *flags, code=code)
    return done, pids


@pytest.mark.parametrize("rank", [1, 0])
def test_a_killed_rank_is_named_and_the_run_ends_as_if_none_had_been(cluster, small, alone, tmp_path, rank):
    done, pids = struck(small, tmp_path, rank, signal.SIGKILL, *SAVES)
    assert f"rank {rank} at " in done.out
    assert f"(process {pids[0]}) was lost: The actor is dead because its worker process has died" in done.out
    assert len(pids) == 2
    assert pids[0] != pids[1]
    assert (
        done.out.count(" step 1/4 ") == 1
    )  # from a checkpoint: of step 2, or of step 1 if rank 0 was writing that still
    check_same(tmp_path / "run", alone[2])


def test_a_rank_that_hangs_is_ended_and_the_run_goes_on(cluster, small, alone, tmp_path):
    done, pids = struck(small, tmp_path, 1, signal.SIGSTOP, *SAVES, "--process-timeout-s", "8")
    assert "rank 1 of the trainer did not answer within trainer.process_timeout_s = 8 s" in done.out
    assert not Path(f"/proc/{pids[0]}").exists()
    check_same(tmp_path / "run", alone[2])


def test_without_checkpoints_the_run_begins_again(cluster, small, alone, tmp_path):
    done, _ = struck(small, tmp_path, 1, signal.SIGKILL)
    assert "checkpoint_every_steps = 0: should an actor be lost, the run begins again" in done.out
    assert [done.out.count(f" step {step}/4 ") for step in (1, 2)] == [2, 2]
    check_same(tmp_path / "run", alone[2])


def test_a_lost_node_costs_no_step(cluster, nodes, small, tmp_path):
    """Each rank takes all CPUs of a node, so that two nodes have one each and the third one is spare."""
    flags = ("--num-processes", "2", "--cluster", "auto", "--num-threads", "2", "--reward.function")
    flags = (*flags, small.reward("slow"), *SAVES)
    run(small, tmp_path / "whole", *flags)
    placed, lost, variables = [], [], driver._Driver._variables

    def seen(self):
        placed.append([place.node for place in self._places])
        return variables(self)

    def strike():
        while not (tmp_path / "run/checkpoints/step_000002").exists():
            time.sleep(0.02)
        lost.append(nodes.lose_one_of(placed[0]))

    thread = threading.Thread(target=strike)
    thread.start()
    with patch.object(driver._Driver, "_variables", seen):
        done = run(small, tmp_path / "run", *flags)
    thread.join()
    nodes.complete()
    assert f"rank {placed[0].index(lost[0])} at " in done.out
    assert "was lost: The actor " in done.out
    assert lost[0] not in placed[1]
    assert len(set(placed[1])) == 2
    check_same(tmp_path / "run", tmp_path / "whole")


def test_ctrl_c_ends_the_run_after_a_step_with_everything_saved(cluster, small, tmp_path):
    def press():
        while len(metrics(tmp_path / "run")) < 2 if (tmp_path / "run/metrics.jsonl").exists() else True:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    flags = ("--num-processes", "2", "--num-steps", "2000", *SAVES)
    done = strop("train", small.train, "--cluster", "auto", *flags, "--run.folder", tmp_path / "run")
    assert done.code == 130, done
    thread.join()
    last = metrics(tmp_path / "run")[-1]["step"]
    assert 2 <= last < 2000
    assert (tmp_path / f"run/checkpoints/step_{last:06d}").exists()
    assert (tmp_path / "run/model").exists()


def test_a_mistake_of_the_user_is_told_as_without_a_cluster(cluster, small, tmp_path):
    done = run(small, tmp_path / "run", "--cluster", "auto", "--data.path", "nowhere.jsonl", code=2)
    assert "data.path must be a file, got nowhere.jsonl: there is no such file" in done.err
    assert not (tmp_path / "run").exists()


def test_a_cluster_without_room_says_what_it_has(cluster, small, tmp_path):
    flags = ("--num-processes", "9", "--process-timeout-s", "1")
    done = run(small, tmp_path / "run", "--cluster", "auto", *flags, code=1)
    assert "the cluster had no room for 9 actors with 9 CPUs and 0 GPUs within trainer.process_timeout_s" in done.err
    assert "it has 6 CPUs and 0 GPUs" in done.err
