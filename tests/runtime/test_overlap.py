"""A run whose scorer works while others are sampled is the run whose scorer waits, but for its times."""

import gzip
import json
from contextlib import contextmanager

import pytest
from commands.small_runs import metrics, read_lines, same_weights, small_once

import strop
from strop.rewards.scorer import Scorer


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@contextmanager
def after_sampling(scorer, advance):
    yield None


def test_a_run_that_overlaps_makes_the_numbers_of_one_that_does_not(small, tmp_path, monkeypatch):
    """With groups that are dropped and sampled anew, and others that wait for the next step."""
    options = {"reward.function": small.reward("slow"), "run.num_steps": 2, "run.checkpoint_every_steps": 1}
    options |= {"filter.equal_rewards": True, "filter.surplus": "keep", "rollout.prompts_per_round": 5}
    options |= {"engine.max_sequences": 5, "rollout.max_response_tokens": 3, "rollout.group_size": 2}
    for name in ("ahead", "after"):
        strop.train(strop.load_config(small.train, {**options, "run.folder": str(tmp_path / name)}))
        monkeypatch.setattr(Scorer, "ahead", after_sampling)
    assert metrics(tmp_path / "ahead") == metrics(tmp_path / "after")
    assert sum(row["dropped/equal_rewards"] for row in metrics(tmp_path / "ahead")) > 0
    for step in ("step_000001.jsonl", "step_000002.jsonl"):
        assert read_lines(tmp_path / "ahead/rollouts" / step) == read_lines(tmp_path / "after/rollouts" / step)
    assert same_weights(tmp_path / "ahead/model", tmp_path / "after/model")
    idle = [
        [row["seconds/idle"] for row in read_lines(tmp_path / name / "metrics.jsonl")] for name in ("ahead", "after")
    ]
    assert all(seconds > 0 for seconds in idle[0])
    assert idle[1] == [0.0, 0.0]


def test_steps_after_the_first_are_traced_with_their_phases_and_make_the_same_numbers(small, tmp_path, capfd):
    for name, steps in (("plain", 0), ("traced", 1)):
        options = {"run.num_steps": 3, "run.profile_steps": steps, "run.folder": str(tmp_path / name)}
        strop.train(strop.load_config(small.exact, options))
    assert metrics(tmp_path / "plain") == metrics(tmp_path / "traced")
    assert "profiler" not in capfd.readouterr().err
    assert not (tmp_path / "plain/profile").exists()
    assert sorted(path.name for path in (tmp_path / "traced/profile").iterdir()) == [
        "step_000002.json.gz",
        "step_000002.txt",
    ]
    with gzip.open(tmp_path / "traced/profile/step_000002.json.gz") as trace:
        names = [event.get("name") for event in json.load(trace)["traceEvents"]]
    assert [names.count(phase) for phase in ("sample", "score", "logprobs", "train")] == [1, 1, 1, 1]
    assert "aten::mm" in names
    assert "aten::" in (tmp_path / "traced/profile/step_000002.txt").read_text()
