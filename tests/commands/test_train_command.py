"""strop train in a process of its own: what it prints, what it writes, and that the same config gives the same bits."""

import json
import math
import subprocess
import sys

import pytest
from commands.small_runs import (
    ENVIRONMENT,
    metrics,
    read_lines,
    same_weights,
    small_once,
    strop,
    strop_process,
    weights,
)

from strop.config import load_config
from strop.config.tree import values


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.fixture(scope="module")
def made(small, tmp_path_factory):
    """A run of three steps in a process of its own: what the command left, and the run folder."""
    folder = tmp_path_factory.mktemp("made")
    flags = ("--run.folder", "first", "--checkpoint-every-steps", "2", "--lr-schedule", "linear", *small.eval_flags)
    return strop_process("train", small.train, *flags, cwd=folder), folder / "first"


def test_a_run_prints_the_objective_the_first_prompt_and_one_line_a_step(made):
    done, _ = made
    assert (done.code, done.err) == (0, "")
    assert "minimise  sum_t w_t [ loss_t ]" in done.out
    assert "first prompt as the model reads it: " in done.out
    assert [line.split()[1] for line in done.out.splitlines() if line.startswith("step ")] == ["1/3", "2/3", "3/3"]
    assert [f"eval after step {n}: greedy reward" in done.out for n in (0, 1, 3)] == [True, False, True]
    assert "first/report.html" in done.out


def test_a_run_folder_holds_what_the_design_lists_and_nothing_half_written(made):
    _, run = made
    listed = [
        "best",
        "checkpoints",
        "config.toml",
        "metrics.jsonl",
        "model",
        "objective.txt",
        "report.html",
        "rollouts",
    ]
    assert sorted(path.name for path in run.iterdir()) == listed
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000002", "step_000003"]
    steps = [f"step_00000{n}.jsonl" for n in (1, 2, 3)]
    assert sorted(p.name for p in (run / "rollouts").iterdir()) == [
        "about.json",
        "eval_000000.jsonl",
        "eval_000003.jsonl",
        *steps,
        "weights.jsonl",
    ]


def test_the_written_config_loads_again_and_equals_that_of_the_run(small, made):
    _, run = made
    flags = {"run.folder": "first", "run.checkpoint_every_steps": 2, "trainer.lr_schedule": "linear"}
    held_out = {"eval.data.kind": "jsonl", "eval.data.path": f"{small.folder}/held_out.jsonl"}
    given = load_config(small.train, {**flags, **held_out, "eval.data.max_prompts": 8})
    assert values(load_config(run / "config.toml")) == values(given)


def test_the_written_config_says_where_each_value_comes_from(small, made):
    lines = (made[1] / "config.toml").read_text().splitlines()
    lines = lines[: lines.index("[critic]")]  # which has a rate of its own
    origin = {line.split(" = ")[0]: line.rpartition("# ")[2] for line in lines if " = " in line}
    assert (origin["lr_schedule"], origin["group_size"]) == ("command line", str(small.train))
    assert origin["weight_decay"] == "default"


def test_the_written_objective_is_the_one_that_was_printed(made):
    done, run = made
    assert (run / "objective.txt").read_text() in done.out


def test_metrics_have_one_line_of_finite_numbers_a_step(made):
    start, *rows = read_lines(made[1] / "metrics.jsonl")
    assert (start["step"], {name.partition("/")[0] for name in start}) == (0, {"step", "eval"})
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [name for row in rows for name, value in row.items() if value is None or not math.isfinite(value)] == []
    expected = {"reward", "loss", "entropy", "grad_norm", "clip_fraction", "logprob_gap", "response_tokens", "lr"}
    assert expected <= rows[0].keys()
    assert "eval/greedy_reward" in rows[2]
    # two updates a step, six in all, from the peak of 0.01 linearly to 0; of a step's updates the larger is shown
    assert [row["lr"] for row in rows] == pytest.approx([0.01, 0.01 * 4 / 6, 0.01 * 2 / 6], rel=1e-12)


def test_the_numbers_of_a_step_follow_from_its_rollouts(made):
    _, run = made
    for row in read_lines(run / "metrics.jsonl")[1:]:
        rollouts = read_lines(run / f"rollouts/step_{row['step']:06d}.jsonl")
        assert len(rollouts) == 16
        for r in rollouts:
            assert len(r["rollout_logprobs"]) == r["num_response_tokens"]
            assert len(r["tokens"]) == len(r["prompt"]) + r["num_response_tokens"]  # one token a letter
            earned = sum(letter in "abcd" for letter in r["response"]) / 8 + 0.5 * (r["finish_reason"] == "stop")
            assert r["reward"] == earned
        assert row["reward"] == pytest.approx(sum(r["reward"] for r in rollouts) / 16, abs=1e-12)
        cut = [r["finish_reason"] == "length" for r in rollouts]
        assert row["truncated"] == sum(cut) / 16
        tokens = sum(r["num_response_tokens"] for r in rollouts)
        assert row["response_tokens"] == tokens / 16


def test_the_written_model_loads_in_a_fresh_process_and_differs_from_the_start(small, made):
    program = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
start, model = (AutoModelForCausalLM.from_pretrained(path) for path in sys.argv[1:])
text = AutoTokenizer.from_pretrained(sys.argv[2])("abc=").input_ids
before = start.state_dict()
print(json.dumps([text, sum(not value.equal(before[name]) for name, value in model.state_dict().items())]))
"""
    command = [sys.executable, "-c", program, small.start, made[1] / "model"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    tokens, num_changed = json.loads(done.stdout)
    assert tokens == [3, 4, 5, 2]  # <pad> <eos> = a b c ...
    assert num_changed > 10


def test_the_written_config_run_again_gives_the_same_bits(made, tmp_path):
    """Also from another process than the first."""
    _, run = made
    assert strop("train", run / "config.toml", "--run.folder", tmp_path / "other").code == 0
    assert same_weights(tmp_path / "other/model", run / "model")
    assert metrics(tmp_path / "other") == metrics(run)
    for step in (1, 2, 3):
        file = f"rollouts/step_{step:06d}.jsonl"
        assert (tmp_path / "other" / file).read_text() == (run / file).read_text()


def test_another_seed_gives_other_bits(made, tmp_path):
    _, run = made
    assert strop("train", run / "config.toml", "--run.folder", tmp_path / "other", "--seed", "1").code == 0
    assert not same_weights(tmp_path / "other/model", run / "model")
    first, second = (read_lines(folder / "rollouts/step_000001.jsonl") for folder in (run, tmp_path / "other"))
    assert [r["prompt"] for r in first] != [r["prompt"] for r in second]


def test_the_run_folder_is_named_by_the_config_file_unless_said_otherwise(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert strop("train", small.train, "--num-steps", "1").code == 0
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["train"]


def test_rollouts_are_not_written_when_they_are_not_wanted(small, tmp_path):
    flags = ("--num-steps", "1", "--save-rollouts", "false", *small.eval_flags, "--run.folder", tmp_path / "run")
    assert strop("train", small.train, *flags).code == 0
    assert list((tmp_path / "run/rollouts").glob("*")) == []


def test_a_run_leaves_the_model_that_it_started_from_as_it_was(small, tmp_path):
    weights.cache_clear()
    before = {path.name: path.read_bytes() for path in small.start.iterdir()}
    assert strop("train", small.train, "--num-steps", "1", "--run.folder", tmp_path / "run").code == 0
    assert {path.name: path.read_bytes() for path in small.start.iterdir()} == before
