"""strop train with engines whose samples come from servers, or from vLLM in this process, against what stands for them and
samples as the engine torch does."""

from pathlib import Path

import pytest
from commands.small_runs import metrics, read_lines, same_weights, small_once, strop

from strop.runtime.audit import engine_servers, sglang_server, vllm_server
from strop.runtime.audit.teacher_server import Dropped, serving
from strop.runtime.audit.vllm_core import in_place_of_vllm

KINDS = {"vllm": vllm_server.StandIn, "sglang": sglang_server.StandIn}
IN_PROCESS = ("--engine.kind", "vllm_in_process")
OF_SERVERS = ("weights_bytes", "engine_restarts")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.fixture(scope="module")
def server(small):
    return vllm_server.StandIn(small.start)


@pytest.fixture
def flags(server):
    server.begin()
    with serving(server) as address:
        yield at("vllm", address)


def at(kind, address):
    return ["--engine.kind", kind, "--engine.addresses", f'["{address}"]']


def train(small, folder, *flags):
    done = strop("train", small.train, *flags, "--run.folder", folder)
    assert done.code == 0, done.err
    return done


def numbers(folder):
    return [{k: v for k, v in row.items() if k not in OF_SERVERS} for row in metrics(folder)]


@pytest.fixture(scope="module")
def own(small, tmp_path_factory):
    """The numbers of a run of the engine torch."""
    folder = tmp_path_factory.mktemp("torch") / "run"
    train(small, folder, *small.eval_flags)
    return numbers(folder)


def agree(found, own):
    assert [row.keys() for row in found] == [row.keys() for row in own]
    skip = {"logprob_gap", "logprob_gap_max"}  # rounding themselves
    for row, other in zip(found, own, strict=True):
        assert [k for k in row if k not in skip and row[k] != pytest.approx(other[k], rel=2e-3, abs=1e-4)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_that_of_the_engine_torch_though_its_server_is_lost_on_the_way(small, own, kind, tmp_path):
    count, server = 0, KINDS[kind](small.start)

    def lose(path, body, answer):
        nonlocal count
        count += path.endswith("/generate")
        if count in (5, 40):
            raise Dropped
        return answer()

    server.begin(lose)
    with serving(server) as address:
        done = train(small, tmp_path / "served", *at(kind, address), *small.eval_flags)
    agree(numbers(tmp_path / "served"), own)
    assert sum(row.get("engine_restarts", 0) for row in metrics(tmp_path / "served")) == 2
    assert (done.out + done.err).count("is lost") == 2


def test_a_run_with_vllm_in_this_process_is_that_of_the_engine_torch_and_so_is_its_evaluation(small, own, tmp_path):
    with in_place_of_vllm():
        train(small, tmp_path / "run", *IN_PROCESS, *small.eval_flags)
        done = strop("eval", tmp_path / "run", *IN_PROCESS, *small.eval_flags)
    agree(numbers(tmp_path / "run"), own)
    rows = [row for row in read_lines(tmp_path / "run/metrics.jsonl") if row["step"]]
    for row in rows:  # this process is at work while it samples, and waits for scores at most
        assert row["seconds/idle"] <= row["seconds/score"] + row["seconds/sample"] / 2
    assert done.code == 0, done.err
    assert f"{own[-1]['eval/greedy_reward']:.3f}" in done.out


@pytest.mark.parametrize("command", ["train", "eval"])
def test_without_vllm_a_run_with_it_in_process_ends_before_anything_is_loaded(small, tmp_path, monkeypatch, command):
    monkeypatch.setattr("strop.engines.vllm.core.find_spec", lambda name: None)
    monkeypatch.setattr("strop.runtime.models.load_weights", None)  # would be called
    folder = ("--run.folder", tmp_path / "run") if command == "train" else ()
    done = strop(command, small.train, *IN_PROCESS, *small.eval_flags, *folder)
    assert done.code == 2
    assert done.err.startswith("error: engine.kind = vllm_in_process needs vLLM in the environment that runs strop")
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped(small, server, flags, tmp_path):
    train(small, tmp_path / "whole", *flags)
    server.begin()
    train(small, tmp_path / "parts", *flags, "--num-steps", "2", "--run.checkpoint_every_steps", "1")
    server.begin()  # as after its machine was away
    train(small, tmp_path / "parts", *flags, "--run.checkpoint_every_steps", "1", "--resume")
    assert same_weights(tmp_path / "whole/model", tmp_path / "parts/model")


def test_an_evaluation_alone_samples_in_the_servers_too(small, server, flags):
    done = strop("eval", small.train, *small.eval_flags, *flags)
    assert done.code == 0, done.err
    assert server.num_sampled > 8


def test_an_evaluation_ends_the_servers_that_it_starts(small, tmp_path):
    (tmp_path / "model").symlink_to(small.start)
    with engine_servers.standing(tmp_path):
        python = str(tmp_path / engine_servers.PYTHONS[0])
        done = strop("eval", small.train, *small.eval_flags, "--engine.kind", "vllm", "--engine.python", python)
    assert done.code == 0, done.err
    assert "starts; its log is /" in done.out + done.err
    log = (done.out + done.err).partition("its log is ")[2].split()[0]
    assert not Path(log).parent.exists()


def test_a_server_that_is_not_there_ends_the_command_with_one_line_and_nothing_written(small, tmp_path):
    folder = tmp_path / "run"
    done = strop(
        "train",
        small.train,
        "--engine.kind",
        "vllm",
        "--engine.addresses",
        '["http://127.0.0.1:1"]',
        "--engine.start_timeout_s",
        "0.2",
        "--run.folder",
        folder,
    )
    assert done.code != 0
    assert "engine.start_timeout_s = 0.2 s went by in which vLLM server http://127.0.0.1:1 did not answer" in done.err
    assert "Traceback" not in done.err


def test_servers_sample_from_adapters_added_to_the_model(small, server, flags, tmp_path):
    lora = ("--lora.rank", "4", "--lr", "0.05", "--run.checkpoint_every_steps", "1")
    train(small, tmp_path / "own", *lora, "--num-steps", "3")
    train(small, tmp_path / "served", *flags, *lora, "--num-steps", "2")
    server.begin()
    train(small, tmp_path / "served", *flags, *lora, "--num-steps", "3", "--resume")  # from adapters that have learned
    for found, wanted in zip(numbers(tmp_path / "served"), numbers(tmp_path / "own"), strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=2e-3, abs=1e-4)
        assert found["reward"] == wanted["reward"]
        assert found["logprob_gap"] < 1e-4


def test_several_processes_train_adapters_and_servers_sample(small, flags, tmp_path):
    lora = ("--lora.rank", "4", "--lr", "0.05", "--num-steps", "2")
    train(small, tmp_path / "of_2", *flags, *lora, "--num-processes", "2")
    train(small, tmp_path / "of_1", *lora)
    for found, wanted in zip(numbers(tmp_path / "of_2"), numbers(tmp_path / "of_1"), strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=2e-3, abs=1e-4)
        assert found["reward"] == wanted["reward"]
        assert found["logprob_gap"] < 1e-4


def test_a_run_that_samples_ahead_is_that_of_the_engine_torch(small, flags, tmp_path):
    ahead = ("--max-off-policy-steps", "2", "--num-steps", "4", *small.eval_flags, "--eval.every_steps", "2")
    train(small, tmp_path / "served", *flags, *ahead)
    train(small, tmp_path / "own", *ahead)
    served, own = numbers(tmp_path / "served"), numbers(tmp_path / "own")
    assert [row["staleness"] for row in served if row["step"]] == [0, 2, 2, 2]
    skip = {"logprob_gap", "logprob_gap_max", "queue/ready_groups"}  # rounding and time
    for row, other in zip(served, own, strict=True):
        differ = [k for k in other if k not in skip and row[k] != pytest.approx(other[k], rel=2e-3, abs=1e-4)]
        assert differ == []


def test_samples_in_flight_in_a_server_go_on_with_new_weights(small, server, flags, tmp_path):
    server.begin(token_s=0.01)
    ahead = ("--max-off-policy-steps", "4", "--streaming", "--num-steps", "5", "--rollout.max_response_tokens", "12")
    train(small, tmp_path / "run", *flags, *ahead, "--rollout_form", "whole")
    rows = metrics(tmp_path / "run")
    assert all(row["staleness_max"] <= 4 for row in rows)
    assert max(row["mixed_versions"] for row in rows) > 0
    files = sorted((tmp_path / "run/rollouts").glob("step_*.jsonl"))
    versions = [row["policy_versions"] for path in files for row in read_lines(path)]
    assert all(one == sorted(one) for one in versions)
    assert any(len(set(one)) > 1 for one in versions)
