"""Several named rewards and GDPO, through the command: what is taken, and what is refused in which words."""

import pytest
from commands.small_runs import metrics, small_once, strop


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.fixture
def trained(small, tmp_path):
    """A run of one batch with GDPO and this reward function."""

    def run(source, *flags):
        (tmp_path / "named.py").write_text(f"def score(rollout):\n    return {source}\n")
        kind = ("--algorithm.advantage.kind", "gdpo", "--reward.function", f"{tmp_path}/named.py:score")
        return strop("train", small.train, "--num-steps", "1", *kind, *flags, "--run.folder", tmp_path / "run")

    return run


def test_a_score_that_fails_is_zero_in_each_name_and_the_run_goes_on(trained, tmp_path):
    done = trained("{'long': len(rollout.text), 'a': 1.0} if rollout.sample else 1 / 0", "--reward.on_error", "zero")
    assert done.code == 0, done.err
    (row,) = metrics(tmp_path / "run")
    assert row["reward/num_errors"] == 4
    assert row["grad_norm"] > 0


def test_rewards_with_other_names_stop_the_run_and_both_are_named(trained):
    done = trained("{'right': 1.0} if rollout.sample < 2 else {'right': 1.0, 'short': 0.5}")
    assert done.code == 2
    assert "gdpo needs the same named rewards of every rollout of a batch, got right for prompt row " in done.err
    assert "sample 0 and right, short for prompt row " in done.err
    assert "sample 2" in done.err


def test_a_plain_number_beside_named_rewards_is_said_to_be_one(trained):
    done = trained("1.0 if rollout.sample == 3 else {'right': 1.0}")
    assert "got right for prompt row " in done.err
    assert "and a plain number for prompt row " in done.err


def test_plain_numbers_everywhere_are_said_to_be_what_is_wrong(trained):
    done = trained("0.5 * rollout.sample")
    assert done.code == 2
    assert "gdpo needs a reward function that returns several named rewards as a dict, got a plain number" in done.err
    assert "on_error" not in done.err


def test_scores_that_all_failed_are_said_to_have_failed(trained):
    done = trained("1 / 0", "--reward.on_error", "zero")
    assert done.code == 2
    assert "With reward.on_error = zero a score that failed is 0, and here all are 0." in done.err


def test_a_batch_without_any_score_makes_no_step(trained, tmp_path):
    done = trained("None")
    assert done.code == 0, done.err
    assert metrics(tmp_path / "run")[0]["skipped_steps"] == 2
