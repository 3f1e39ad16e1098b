"""For every preset, and for everything else that a step may hold on to: 2 steps and 1 after resuming are 3 steps."""

import filecmp
import shutil

import pytest
from commands.small_runs import metrics, same_weights, small_once, strop

from strop.config import PRESETS

LENGTH = ("--num-steps", "3", "--checkpoint-every-steps", "1", "--keep-checkpoints", "3")
SMALL = ("--rollout.group_size", "3", "--rollout.prompts_per_step", "2", "--data.max_prompts", "8")
# What a step may hold on to beside what the presets do; those have 2 updates per batch.
OTHERS = {
    "adaptive_kl": ("--algorithm.kl.coef", "0.1", "--algorithm.kl.target", "0.01"),
    "adaptive_entropy": ("--algorithm.entropy_coef", "0.01", "--algorithm.entropy_target", "1.0"),
    "refreshed_reference": ("--algorithm.kl.coef", "0.1", "--algorithm.kl.refresh_steps", "2"),
    "filters_with_surplus": ("--filter.equal_rewards", "--filter.surplus", "keep", "--rollout.prompts_per_round", "5"),
    "curriculum": ("--curriculum.kind", "accuracy"),
    "schedule": ("--lr-schedule", "cosine", "--warmup-steps", "2", "--weight-decay", "0.1"),
    "bfloat16": ("--model.dtype", "bfloat16"),
    "one_update": ("--updates-per-batch", "1"),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


def check_resumed_equals_whole(small, tmp_path, *flags):
    whole, run = tmp_path / "whole", tmp_path / "run"
    done = strop("train", small.train, *LENGTH, *SMALL, *flags, "--run.folder", whole)
    assert done.code == 0, done.err
    shutil.copytree(whole, run)
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints/step_000003")
    again = strop("train", small.train, *LENGTH, *SMALL, *flags, "--run.folder", run, "--resume")
    assert "step_000002 after step 2" in again.out, again.err
    assert same_weights(run / "model", whole / "model")
    assert metrics(run) == metrics(whole)
    last = sorted(path.name for path in (whole / "checkpoints/step_000003").iterdir())
    same = filecmp.cmpfiles(run / "checkpoints/step_000003", whole / "checkpoints/step_000003", last, shallow=False)
    assert same == (last, [], [])


@pytest.mark.parametrize("preset", PRESETS)
def test_a_run_of_every_preset_resumes_bit_for_bit(small, tmp_path, preset):
    check_resumed_equals_whole(small, tmp_path, "--algorithm.preset", preset)


@pytest.mark.parametrize("flags", OTHERS.values(), ids=OTHERS)
def test_a_run_resumes_bit_for_bit_with(small, tmp_path, flags):
    check_resumed_equals_whole(small, tmp_path, *flags)


def test_a_run_with_a_teacher_resumes_bit_for_bit(small, tmp_path):
    check_resumed_equals_whole(small, tmp_path, "--distillation.teacher", small.start)


RANDOM = """
import random

import numpy
import torch

def score(rollout):
    return random.random() + float(numpy.random.rand()) + float(torch.rand(()))
"""


@pytest.mark.parametrize("more", [(), ("--eval.every_steps", "1")], ids=["", "with_evaluations"])
def test_a_scorer_that_draws_from_global_random_states_resumes_bit_for_bit(small, tmp_path, more):
    """Those of Python, numpy and torch; evaluations draw from them too. Functions in workers have random numbers of their
    rollout's own; this one is called in the process of the run."""
    (tmp_path / "mine.py").write_text(RANDOM)
    more = (*more, *small.eval_flags) if more else ()
    flags = ("--reward.function", f"{tmp_path}/mine.py:score", "--reward.num_workers", "0", *more)
    check_resumed_equals_whole(small, tmp_path, *flags)
    rewards = [row["reward"] for row in metrics(tmp_path / "whole") if row["step"] > 0]
    assert len(set(rewards)) == len(rewards)


def test_the_random_states_of_the_caller_are_its_own_again_after_a_run(small, tmp_path):
    import random

    import numpy
    import torch

    def drawn():
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    def seed():
        random.seed(5)
        numpy.random.seed(5)
        torch.manual_seed(5)

    seed()
    expected = drawn()
    seed()
    assert strop("train", small.train, *SMALL, "--num-steps", "1", "--run.folder", tmp_path / "run").code == 0
    assert drawn() == expected
