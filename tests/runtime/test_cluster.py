"""What a run says of clusters without one: Ray is an extra that nothing imports by itself. tests/real_ray has the others."""

import sys

import pytest
from commands.small_runs import small_once, strop
from runtime.audited import BASE

from strop.config import TrainConfig, VLLMEngineOptions, make_config
from strop.runtime.audit import audit


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


def test_the_config_of_a_run_on_a_cluster_is_audited_without_one():
    values = BASE | {"engine": {"num_replicas": 2}, "rollout": {"group_size": 4, "num_scorers": 2}}
    config = make_config(TrainConfig, values, {}, file="x.toml")
    findings = [*audit(config, only="engine.num_replicas"), *audit(config, only="rollout.num_scorers")]
    assert [f.verdict for f in findings] == ["cannot act here"] * 2
    assert [f.value for f in findings] == [2, 2]


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
