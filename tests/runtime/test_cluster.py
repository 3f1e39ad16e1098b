"""What a run says of clusters without one: Ray is an extra that nothing imports by itself. Runs on a cluster: tests/real_ray."""

import sys

import pytest
from commands.small_runs import small_once, strop

from strop.config import VLLMEngineOptions
from strop.config.sampling import FunctionRewardOptions
from strop.rewards import make_scorer


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


def refusal(small, folder, *flags):
    done = strop("train", small.train, "--run.folder", folder, *flags)
    assert done.code == 2
    assert not folder.exists()
    return done.err


def test_a_run_without_a_cluster_imports_no_ray(small, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # to import it is an error now
    assert strop("train", small.train, "--run.folder", tmp_path / "run", "--num-steps", "1").code == 0


def test_a_cluster_needs_ray(small, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    words = refusal(small, tmp_path / "run", "--cluster", "local")
    assert "--cluster must have Ray: pip install 'strop[ray]'" in words


@pytest.mark.parametrize(
    "flag, option", [("--num-replicas", "engine.num_replicas"), ("--num-scorers", "rollout.num_scorers")]
)
def test_actors_without_a_cluster_are_refused(small, tmp_path, monkeypatch, flag, option):
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    words = refusal(small, tmp_path / "run", flag, "2")
    assert f"{option} must be 0 without a cluster, got 2: each is an actor of Ray." in words


def test_a_function_that_is_called_once_a_step_is_not_divided(small, tmp_path):
    words = refusal(small, tmp_path / "run", "--num-scorers", "2", "--reward.batched", "true")
    assert "rollout.num_scorers must be 0 with such a reward, got 2: its function is called once a step" in words


def test_replicas_take_no_adapters(small, tmp_path):
    words = refusal(small, tmp_path / "run", "--num-replicas", "2", "--lora.rank", "4")
    assert "engine.num_replicas must be 0 with lora.rank = 4, got 2" in words


def test_a_cluster_beside_a_launcher_is_refused(small, tmp_path, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    words = refusal(small, tmp_path / "run", "--cluster", "local")
    assert "--cluster must be left out where a launcher starts the ranks" in words


@pytest.mark.parametrize(
    "args, gpus",
    [((), 1), (("--tensor-parallel-size", "4"), 4), (("--tensor-parallel-size=2",), 2), (("-tp", "8"), 8)],
)
def test_a_server_has_the_gpus_that_its_arguments_ask_for(args, gpus):
    assert VLLMEngineOptions(server_args=args).gpus_per_server == gpus


RANDOM = """
import random

def score(rollout):
    return random.random()
"""


@pytest.mark.parametrize("num_workers", [None, 0])
def test_parts_of_a_batch_have_the_random_numbers_of_the_whole(tmp_path, num_workers):
    from rewards.written_rollouts import make_rollout

    (tmp_path / "scorer.py").write_text(RANDOM)
    options = FunctionRewardOptions(function=f"{tmp_path}/scorer.py:score", num_workers=num_workers)
    rollouts = [make_rollout("a") for _ in range(5)]

    def scored(*parts):
        scorer = make_scorer(options)
        try:
            found = {first: scorer.outcomes(rollouts[first:end], first=first)[0] for first, end in parts}
        finally:
            scorer.close()
        return [outcome.reward for first in sorted(found) for outcome in found[first]]

    whole, parts = scored((0, 5)), scored((3, 5), (0, 3))
    assert len(set(whole)) == 5
    assert num_workers == 0 or whole == parts
