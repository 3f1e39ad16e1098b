"""Batches sampled ahead: by which weights follows from their numbers, and a run that stops goes on as if it had not."""

import shutil
import signal
from functools import cache

import pytest
import torch
from commands.small_runs import metrics, read_lines, same_weights, small_once, strop
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

STEPS, AHEAD = 6, 2
FLAGS = ("--num-steps", STEPS, "--updates-per-batch", 1, "--max-off-policy-steps", AHEAD)
SAVING = ("--checkpoint-every-steps", 1, "--keep-checkpoints", 9)
SEEN = (*FLAGS, *SAVING, "--rollout_form", "whole")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    run = tmp_path_factory.mktemp("ahead") / "run"
    assert strop("train", small.train, *SEEN, *small.eval_flags, "--eval.every_steps", 2, "--run.folder", run).code == 0
    return run


def steps(run):
    """Lines of metrics without that of the evaluation before step 1."""
    return [row for row in metrics(run) if row["step"] > 0]


def rollouts(run, step):
    return read_lines(run / f"rollouts/step_{step:06d}.jsonl")


@cache
def model_after(small, run, step):
    """The model as the checkpoint of a step has it; that of the start for step 0."""
    model = AutoModelForCausalLM.from_pretrained(small.start).eval()
    if step:
        model.load_state_dict(load_file(run / f"checkpoints/step_{step:06d}/weights.safetensors"), strict=False)
    return model


@torch.no_grad()
def logprobs(model, row):
    tokens = torch.tensor(row["tokens"])
    found = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    return found[row["prompt_length"] - 1 :]


def test_with_0_steps_ahead_it_is_the_synchronous_run_bit_for_bit(small, tmp_path):
    for name, flags in (("plain", ()), ("zero", ("--max-off-policy-steps", 0))):
        assert strop("train", small.train, *flags, "--run.folder", tmp_path / name).code == 0
    assert metrics(tmp_path / "plain") == metrics(tmp_path / "zero")
    assert same_weights(tmp_path / "plain/model", tmp_path / "zero/model")


def test_each_batch_is_of_the_weights_from_before_its_lead(small, whole):
    """Batch n by those of after step n - 1 - 2, the first three by the start's; each of another version would differ."""
    for step in range(1, STEPS + 1):
        version = max(0, step - 1 - AHEAD)
        for row in rollouts(whole, step):
            assert set(row["policy_versions"]) == {version}
            of_sampler = torch.tensor(row["rollout_logprobs"])
            assert torch.allclose(logprobs(model_after(small, whole, version), row), of_sampler, atol=1e-5)
        last = rollouts(whole, step)[0]
        if version < step - 1:
            now = logprobs(model_after(small, whole, step - 1), last)
            assert not torch.allclose(now, torch.tensor(last["rollout_logprobs"]), atol=1e-3)


def test_staleness_is_measured_and_ratios_are_to_the_weights_that_sampled(small, whole):
    """Step 6 begins at version 5 and its batch is of version 3: staleness 2. Its only update's ratios are not 1 but
    exp(log-probability of version 5 - that of version 3)."""
    rows = steps(whole)
    assert [(row["staleness"], row["staleness_max"]) for row in rows] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (2, 2),
        (2, 2),
        (2, 2),
    ]
    ratios = torch.cat(
        [
            (logprobs(model_after(small, whole, 5), row) - torch.tensor(row["rollout_logprobs"])).exp()
            for row in rollouts(whole, 6)
        ]
    )
    assert rows[5]["ratio_max"] == pytest.approx(float(ratios.max()), rel=1e-4)
    assert rows[5]["ratio_min"] == pytest.approx(float(ratios.min()), rel=1e-4)
    assert rows[5]["ratio_max"] > 1.01
    assert "logprob_gap" in rows[0]
    assert "logprob_gap" not in rows[5]  # nothing there is of the weights as they are


def test_how_long_scoring_takes_changes_nothing(small, whole, tmp_path):
    """Now the trainer is ahead of the sampler, and goes on before the engine has taken its weights: it gets copies."""
    flags = (*FLAGS, "--reward.function", small.reward("slow"), "--run.folder", tmp_path / "run")
    assert strop("train", small.train, *flags).code == 0
    assert [row["loss"] for row in steps(tmp_path / "run")] == [row["loss"] for row in steps(whole)]
    assert same_weights(tmp_path / "run/model", whole / "model")


def test_waits_and_queues_are_measured(whole):
    rows = read_lines(whole / "metrics.jsonl")[1:]
    for row in rows:
        assert row["seconds/wait"] >= 0
        assert row["seconds/sampler_idle"] >= 0
        assert row["seconds/sample"] > 0
        assert row["queue/ready_groups"] in (0, 4, 8)
    assert rows[-1]["queue/ready_groups"] == 0


@pytest.mark.parametrize("step", [1, 3])
def test_a_run_that_goes_on_from_a_checkpoint_ends_as_the_whole_run(small, whole, tmp_path, step):
    """Batches that were ahead are in the checkpoint: those of after it are sampled by the weights that the whole run had."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(run / f"checkpoints/step_{later:06d}")
    flags = (*SEEN, *small.eval_flags, "--eval.every_steps", 2, "--run.folder", run, "--resume")
    done = strop("train", small.train, *flags)
    assert done.code == 0, done.err
    timeless = [{k: v for k, v in row.items() if k != "queue/ready_groups"} for row in metrics(run)]
    assert timeless == [{k: v for k, v in row.items() if k != "queue/ready_groups"} for row in metrics(whole)]
    assert same_weights(run / "model", whole / "model")
    assert all(rollouts(run, n) == rollouts(whole, n) for n in range(1, STEPS + 1))


STOPPING = """
import os, signal
from pathlib import Path

def score(rollout):
    flag = Path({flag!r})
    if rollout.group_id == {group} and flag.exists():
        flag.unlink()
        os.kill(os.getpid(), signal.SIGINT)
    return len(set(rollout.tokens[-3:])) / 3
"""


def test_ctrl_c_while_batches_are_ahead_loses_no_prompt_and_trains_on_none_twice(small, tmp_path):
    """The signal comes while a prompt of a later batch is scored, in the run's own process, which scores nothing more."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    flag = tmp_path / "flag"
    (tmp_path / "reward.py").write_text(STOPPING.format(flag=str(flag), group=14))
    scored = ("--reward.function", f"{tmp_path}/reward.py:score", "--reward.num_workers", 0)
    flags = (*FLAGS, "--checkpoint-every-steps", 50, *scored)
    try:
        assert strop("train", small.train, *flags, "--run.folder", tmp_path / "whole").code == 0
        flag.touch()
        done = strop("train", small.train, *flags, "--run.folder", tmp_path / "run")
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.code == 130, done
    made = len(steps(tmp_path / "run"))
    assert 0 < made < STEPS
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == [f"step_{made:06d}"]
    done = strop("train", small.train, *flags, "--run.folder", tmp_path / "run", "--resume")
    assert done.code == 0, done.err
    asked = [
        [row["prompt_row"] for n in range(1, STEPS + 1) for row in rollouts(tmp_path / name, n)]
        for name in ("run", "whole")
    ]
    assert asked[0] == asked[1]


def test_a_run_that_goes_back_forgets_what_was_sampled_ahead(small, tmp_path):
    """At step 3 the weights go back to those of step 2; the next batches are of these."""
    (tmp_path / "reward.py").write_text(
        "def score(r):\n    return 1e68 if r.group_id == 9 and r.sample == 1 else len(set(r.tokens)) / 9\n"
    )
    flags = (
        *FLAGS,
        "--checkpoint-every-steps",
        2,
        "--reward.function",
        f"{tmp_path}/reward.py:score",
        "--reward.num_workers",
        0,
    )
    flags = (*flags, "--on-non-finite", "rollback", "--normalize-std", "false", "--rollout_form", "whole")
    done = strop("train", small.train, *flags, "--run.folder", tmp_path / "run")
    assert done.code == 0, done.err
    assert "step 3 took the run back" in done.out
    rows = steps(tmp_path / "run")
    assert [row["staleness"] for row in rows] == [0, 1, 2, 0, 1, 2]
    assert [{v for r in rollouts(tmp_path / "run", n) for v in r["policy_versions"]} for n in (4, 5, 6)] == [
        {2},
        {2},
        {2},
    ]


def test_a_run_that_goes_on_in_turns_samples_again_what_was_ahead(small, whole, tmp_path):
    """The batches of steps 3 and 4 are in the checkpoint of step 2: their prompts come next, by the newest weights."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for later in range(3, STEPS + 1):
        shutil.rmtree(run / f"checkpoints/step_{later:06d}")
    flags = ("--num-steps", STEPS, "--updates-per-batch", 1, *SAVING, "--rollout_form", "whole", "--run.folder", run)
    flags = (*flags, "--algorithm.old_logprobs", "rollout")
    done = strop("train", small.train, *flags, "--resume", "--allow-change", "rollout")
    assert done.code == 0, done.err
    for step in range(1, STEPS + 1):
        assert [r["prompt_row"] for r in rollouts(run, step)] == [r["prompt_row"] for r in rollouts(whole, step)]
        if step > 2:
            assert {v for r in rollouts(run, step) for v in r["policy_versions"]} == {step - 1}
