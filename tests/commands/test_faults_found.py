"""What a user met at the edges of several parts, each through the real command."""

import json

import pytest
from commands.small_runs import small_once, strop

SCORERS = """
import sys
import torch
from strop.types import TokenRewards

def tensor(rollout):
    return torch.arange(4.0).reshape(2, 2)

def named(rollout):
    n = rollout.num_response_tokens
    return {"shown": TokenRewards([float(i) for i in range(n)]), "all": n % 3 / 2}

def plain(rollout):
    return rollout.num_response_tokens % 3 / 2

def fails_sometimes(rollout):
    if rollout.sample == 1:
        raise ValueError("no")
    return 1.0

def unscored(rollout):
    return None if rollout.sample else 1.0

def exits(group):
    sys.exit(0)

async def later(group):
    return True
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(SCORERS)
    return str(tmp_path / "mine.py")


@pytest.mark.parametrize("filter_", ["group", "rollout"])
@pytest.mark.parametrize("name, says", [("exits", "raised SystemExit"), ("later", "of type coroutine")])
def test_a_filter_that_exits_or_is_async_is_an_error_with_its_option(small, mine, tmp_path, filter_, name, says):
    done = strop("train", small.train, "--run.folder", tmp_path / "run", f"--filter.{filter_}", f"{mine}:{name}")
    assert done.code == 2
    assert f"filter.{filter_} = " in done.err
    assert says in done.err


def test_more_rounds_may_be_given_when_filters_left_too_little(small, mine, tmp_path):
    folder, flags = (
        tmp_path / "run",
        ("--num-steps", "1", "--run.checkpoint_every_steps", "1", "--filter.equal_rewards", "true"),
    )
    assert strop("train", small.train, "--run.folder", folder, *flags).code == 0
    more = ("--num-steps", "2", "--filter.max_rounds", "30", "--resume")
    assert strop("train", small.train, "--run.folder", folder, *flags[2:], *more).code == 0


def test_a_value_of_several_lines_is_one_problem(small, mine, tmp_path):
    done = strop("train", small.train, "--run.folder", tmp_path / "run", "--reward.function", f"{mine}:tensor")
    assert done.code == 2
    assert "problems" not in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_a_named_reward_of_weight_0_is_only_shown_also_under_process(small, mine, tmp_path):
    found = {}
    for name, weights in (("named", "{shown = 0.0, all = 1.0}"), ("plain", "{}")):
        folder = tmp_path / name
        flags = ("--reward.function", f"{mine}:{name}", "--reward.weights", weights, "--num-steps", "1")
        assert (
            strop("train", small.train, *flags, "--run.folder", folder, "--algorithm.advantage.kind", "process").code
            == 0
        )
        found[name] = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert found["named"]["grad_norm"] == pytest.approx(found["plain"]["grad_norm"], rel=1e-6)
    assert found["named"]["reward/part/shown"] > 0


def test_an_evaluation_counts_failed_and_unscored_answers_and_measures_nothing_on_none(small, mine, tmp_path):
    sets = []
    for name, function in (("fails", "fails_sometimes"), ("none", "unscored")):
        at = f"--eval.sets.{name}."
        sets += [
            f"{at}data.kind",
            "jsonl",
            f"{at}data.path",
            f"{small.folder}/held_out.jsonl",
            f"{at}data.max_prompts",
            "4",
        ]
        sets += [f"{at}reward.kind", "function", f"{at}reward.function", f"{mine}:{function}", f"{at}num_samples", "2"]
    sets += ["--eval.sets.fails.reward.on_error", "zero", "--eval.greedy", "false", "--num-steps", "1"]
    assert strop("train", small.train, *sets, "--run.folder", tmp_path / "run").code == 0
    row = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert (row["eval/fails/sampled_num_errors"], row["eval/fails/sampled_num_excluded"]) == (4, 0)
    assert row["eval/fails/sampled_reward"] == 0.5
    assert (row["eval/none/sampled_num_errors"], row["eval/none/sampled_num_excluded"]) == (0, 4)
    assert "eval/none/pass@2" not in row  # no prompt has two scored answers
    assert "eval/none/maj@2" not in row
    assert row["eval/none/pass@1"] == 1.0


def test_the_error_of_a_set_s_own_scorer_names_the_set_s_own_options(small, mine, tmp_path):
    at = "--eval.sets.mine."
    flags = [
        f"{at}data.kind",
        "jsonl",
        f"{at}data.path",
        f"{small.folder}/held_out.jsonl",
        f"{at}reward.kind",
        "function",
    ]
    flags += [f"{at}reward.function", f"{mine}:fails_sometimes", f"{at}num_samples", "2", "--eval.greedy", "false"]
    done = strop("train", small.train, *flags, "--run.folder", tmp_path / "run")
    assert done.code == 2
    assert "set eval.sets.mine.reward.on_error = zero or exclude" in done.err


def test_a_best_step_is_forgotten_where_its_metric_is_measured_on_something_else(small, tmp_path):
    held_out = (
        "--eval.data.kind",
        "jsonl",
        "--eval.data.path",
        f"{small.folder}/held_out.jsonl",
        "--eval.every_steps",
        "1",
    )
    common = (*held_out, "--run.folder", tmp_path / "run", "--run.checkpoint_every_steps", "1")
    assert strop("train", small.train, *common, "--eval.data.max_prompts", "4", "--num-steps", "1").code == 0
    same = strop("train", small.train, *common, "--eval.data.max_prompts", "4", "--num-steps", "2", "--resume")
    assert "is measured otherwise than before" not in same.out + same.err
    other = strop("train", small.train, *common, "--eval.data.max_prompts", "6", "--num-steps", "3", "--resume")
    assert "is measured otherwise than before" in " ".join((other.out + other.err).split())
    assert json.loads((tmp_path / "run/best/best.json").read_text())["step"] == 3


def test_a_curriculum_that_no_step_reaches_and_prompts_that_must_repeat_are_said(small, tmp_path):
    done = strop("train", small.train, "--curriculum.kind", "accuracy", "--run.folder", tmp_path / "a")
    assert "begins after a first pass over the 64 prompts, and 3 steps take 12" in " ".join(
        (done.out + done.err).split()
    )
    done = strop("train", small.train, "--data.max_prompts", "2", "--run.folder", tmp_path / "b", "--num-steps", "1")
    assert "is more than the 2 prompts there are" in " ".join((done.out + done.err).split())
