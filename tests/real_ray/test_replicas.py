"""Replicas of the sampler: the samples of a run without them, weights that follow, and a replica that is lost."""

import pytest
from commands.small_runs import metrics, read_lines, same_weights, strop, without_times
from real_ray.cluster_runs import run

STRIKES = """
import os
from pathlib import Path

struck = Path(__file__).with_name("struck")

def score(rollout):
    if rollout.group_id == 9 and rollout.sample == 0 and not struck.exists():
        found = [p.parent.name for p in Path("/proc").glob("[0-9]*/cmdline") if b"ray::ReplicaActor" in p.read_bytes()]
        struck.write_text(found[0])
        os.kill(int(found[0]), 9)
    return sum(letter in "abcd" for letter in rollout.text) / 8 + 0.5 * (rollout.finish_reason == "stop")
"""


@pytest.fixture(scope="module")
def alone(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    run(small, folder)
    return folder


def check_close(folder, other):
    """The same tokens; log-probabilities of other batches differ by rounding."""
    for step in range(1, 5):
        rows = [read_lines(one / f"rollouts/step_{step:06d}.jsonl") for one in (folder, other)]
        assert [row["tokens"] for row in rows[0]] == [row["tokens"] for row in rows[1]]
        assert rows[0][0]["policy_versions"] == rows[1][0]["policy_versions"]
    for found, wanted in zip(metrics(folder), metrics(other), strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-3, abs=1e-4)
        assert found["logprob_gap_max"] < 1e-4


def test_two_replicas_sample_what_rank_0_would_and_one_that_is_lost_costs_no_sample(cluster, small, alone, tmp_path):
    (tmp_path / "scorer.py").write_text(STRIKES)
    flags = ("--cluster", "auto", "--num-replicas", "2", "--reward.function", f"{tmp_path}/scorer.py:score")
    run(small, tmp_path / "run", *flags)
    check_close(tmp_path / "run", alone)
    rows = metrics(tmp_path / "run")
    assert [row["engine_restarts"] for row in rows] == [0, 0, 1, 0]
    num_bytes = (small.start / "model.safetensors").stat().st_size
    assert all(num_bytes < row["weights_bytes"] / 2 * 1.1 for row in rows)


RANDOM = """
import os, random
from pathlib import Path

struck = Path(__file__).with_name("struck")

def score(rollout):
    if rollout.group_id == 9 and rollout.sample == 0 and struck.exists():
        struck.unlink()
        found = [p.parent.name for p in Path("/proc").glob("[0-9]*/cmdline") if b"ray::ScorerActor" in p.read_bytes()]
        os.kill(int(found[0]), 9)
    return sum(letter in "abcd" for letter in rollout.text) / 8 + random.random()
"""


def test_scorers_on_nodes_give_the_run_of_one_bit_for_bit_though_one_is_lost(cluster, small, tmp_path):
    (tmp_path / "scorer.py").write_text(RANDOM)
    flags = ("--reward.function", f"{tmp_path}/scorer.py:score", "--checkpoint-every-steps", "4")
    run(small, tmp_path / "alone", *flags)
    (tmp_path / "struck").touch()
    run(small, tmp_path / "run", "--cluster", "auto", "--num-scorers", "2", *flags)
    assert not (tmp_path / "struck").exists()
    assert without_times(metrics(tmp_path / "run")) == without_times(metrics(tmp_path / "alone"))
    assert same_weights(tmp_path / "run/model", tmp_path / "alone/model")
    further = ("--lr", "1e-3", "--num-steps", "5", "--resume", "--run.folder", tmp_path / "run")
    assert strop("train", small.train, *flags, *further).code == 0  # without a cluster, and without its actors


def test_what_a_scorer_on_a_node_refuses_is_told_as_without_a_cluster(cluster, small, tmp_path):
    flags = ("--cluster", "auto", "--num-scorers", "1", "--reward.function", small.reward("raises"))
    done = run(small, tmp_path / "run", *flags, code=2)
    assert "raised KeyError: 'no such tool' for prompt row" in done.err


def test_replicas_without_a_cluster_are_refused(small, tmp_path):
    done = run(small, tmp_path / "run", "--num-replicas", "1", code=2)
    assert "engine.num_replicas must be 0 without a cluster, got 1" in done.err
