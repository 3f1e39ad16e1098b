"""Guards that skip a step or take the run back, through the command."""

import json
import shutil

import pytest
from commands.small_runs import metrics, read_lines, refusing, same_weights, small_once, strop

# Stateless, so that a run that is resumed or made again sees the same scores: which step it is follows from the group.
SCORES = """
import sys
sys.path.insert(0, {folder!r})
from reward import score

def third_step(rollout):
    return rollout.group_id // 4 == 2

def first_half(rollout):
    return 1e68 if third_step(rollout) and rollout.group_id == 8 and rollout.sample == 1 else score(rollout)

def second_half(rollout):
    return 1e68 if third_step(rollout) and rollout.group_id == 11 and rollout.sample == 1 else score(rollout)

def from_the_third(rollout):
    return 1e68 if rollout.group_id >= 8 and rollout.sample == 1 else score(rollout)

def scaled(rollout):
    return score(rollout) * (1000 if third_step(rollout) else 1)
"""
FIVE = ("--normalize-std", "false", "--num-steps", "5")
SAVING = ("--checkpoint-every-steps", "2", "--keep-checkpoints", "9")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    small = small_once(tmp_path_factory)
    (small.folder / "scores.py").write_text(SCORES.format(folder=str(small.folder)))
    return small


@pytest.fixture(scope="module")
def trained(small, tmp_path_factory):
    def run(name, *flags, folder=None):
        folder = folder or tmp_path_factory.mktemp("guarded") / "run"
        scores = ("--reward.function", f"{small.folder}/scores.py:{name}")
        return strop("train", small.train, *FIVE, *scores, *flags, "--run.folder", folder), folder

    return run


def checksums(run):
    return {row["step"]: row["policy"] for row in read_lines(run / "rollouts/weights.jsonl")}


@pytest.fixture(scope="module")
def skipping(trained):
    """The third step's first update is not finite, and the step is skipped."""
    done, run = trained("first_half", "--on-non-finite", "skip", *SAVING)
    assert done.code == 0, done
    return done, run


def test_a_skipped_step_leaves_the_weights_and_is_counted(skipping):
    done, run = skipping
    found = checksums(run)
    assert found[3] == found[2] != found[4]
    rows = metrics(run)
    assert [row.get("guard/skipped") for row in rows] == [None, None, 1, 1, 1]
    assert ["loss" in row for row in rows] == [True, True, False, True, True]
    assert "warning: step 3 is skipped: loss or gradient is not finite" in done.out
    assert "skipped 1" in next(line for line in done.out.splitlines() if line.startswith("step 4/5"))


def test_a_step_that_is_skipped_at_its_second_update_leaves_nothing_of_the_first(trained, skipping):
    """Moments, schedule and weights: what follows is the same as where the first update was refused."""
    done, run = trained("second_half", "--on-non-finite", "skip")
    assert done.code == 0, done
    assert checksums(run) == checksums(skipping[1])
    assert metrics(run)[3:] == metrics(skipping[1])[3:]


def test_a_step_of_a_critic_is_skipped_whole(small, tmp_path):
    """The critic has made its update when the policy's loss jumps."""
    flags = ("--algorithm.preset", "ppo", "--algorithm.advantage.whiten", "false", "--num-steps", "4")
    flags += (
        "--max-loss-jump",
        "20",
        "--on-loss-jump",
        "skip",
        "--reward.function",
        f"{small.folder}/scores.py:scaled",
    )
    done = strop("train", small.train, *flags, "--run.folder", tmp_path / "run")
    assert done.code == 0, done
    assert "step 3 is skipped: guards.max_loss_jump" in done.out
    rows = {row.pop("step"): row for row in read_lines(tmp_path / "run/rollouts/weights.jsonl")}
    assert rows[3] == rows[2]
    assert rows[4]["critic"] != rows[3]["critic"]


def test_skipped_steps_in_a_row_stop_the_run(trained):
    done, run = trained("from_the_third", "--on-non-finite", "skip", "--window-steps", "2")
    assert done.code == 1
    assert "stopped: 2 steps in a row were skipped (guards.window_steps)" in done.err
    assert len(metrics(run)) == 3


@pytest.fixture(scope="module")
def taken_back(trained):
    """The third step is not finite; the newest checkpoint is that of step 2, and there is one of before the first step."""
    done, run = trained("second_half", "--on-non-finite", "rollback", *SAVING)
    assert done.code == 0, done
    return done, run


def test_a_run_goes_back_to_its_checkpoint_and_on_with_the_next_prompts(taken_back, skipping):
    done, run = taken_back
    assert checksums(run)[3] == checksums(run)[2]
    assert [row.get("guard/rollbacks") for row in metrics(run)] == [None, None, 1, 1, 1]
    assert f"step 3 took the run back to {run}/checkpoints/step_000002" in done.out
    rows = [[r["prompt_row"] for r in read_lines(f / "rollouts/step_000004.jsonl")] for f in (run, skipping[1])]
    assert rows[0] == rows[1]
    assert checksums(run) == checksums(skipping[1])  # the checkpoint is of the step just before


def test_a_run_without_a_checkpoint_yet_goes_back_to_its_start(trained, small):
    done, run = trained("second_half", "--on-non-finite", "rollback", "--checkpoint-every-steps", "5")
    assert done.code == 0, done
    assert checksums(run)[3] == checksums(run)[0] != checksums(run)[2]
    assert (run / "checkpoints/step_000003").is_dir()  # of what it went on from


def test_a_run_that_was_taken_back_resumes_as_if_it_had_not_stopped(trained, taken_back, tmp_path):
    flags = ("--on-non-finite", "rollback", *SAVING)
    done, run = trained("second_half", *flags, folder=tmp_path / "part")
    for step in (4, 5):
        shutil.rmtree(run / f"checkpoints/step_{step:06d}")
    done, run = trained("second_half", *flags, "--resume", folder=run)
    assert done.code == 0, done
    assert "after step 3" in done.out
    assert metrics(run) == metrics(taken_back[1])
    assert same_weights(run / "model", taken_back[1] / "model")
    state = json.loads((run / "checkpoints/step_000005/run.json").read_text())
    assert state["guards"]["num_rollbacks"] == 1


def test_a_run_is_taken_back_so_often_and_no_more(trained):
    done, run = trained("from_the_third", "--on-non-finite", "rollback", "--max-rollbacks", "2", *SAVING)
    assert done.code == 1
    assert "guards.max_rollbacks = 2 times already" in done.err
    assert [row.get("guard/rollbacks") for row in metrics(run)] == [None, None, 1, 2]


@pytest.mark.parametrize("kind", ["skipping", "taken_back"])
def test_a_refused_step_and_those_after_it_are_replayed_bit_for_bit(kind, request):
    _, run = request.getfixturevalue(kind)
    for step in (3, 4):
        done = strop("replay", run, "--step", step)
        assert (done.code, done.out.splitlines()[-1]) == (0, "identical"), done


def test_the_batch_of_a_step_that_stopped_the_run_is_kept_and_can_be_replayed_and_trained_on(trained, small, tmp_path):
    done, run = trained("first_half")
    assert done.code == 1
    assert "not finite" in done.err
    rows = read_lines(run / "guards/step_000003.jsonl")
    assert [row["sample"] for row in rows if "guard" in row] == [0, 1, 2, 3]  # one reward makes its group's advantages
    assert {row["group"] for row in rows if "guard" in row} == {8}
    assert len(rows) == 16
    replayed = strop("replay", run, "--step", 3, "--rollout", 2)
    assert replayed.code == 0, replayed
    assert "refused: loss or gradient is not finite" in replayed.out
    assert " T " in replayed.out  # the tokens of the update that was refused
    flags = ("--num-steps", "1", "--run.folder", tmp_path / "again")
    again = strop("train", small.train, *FIVE[:2], *flags, "--from-rollouts", run / "guards")
    assert again.code == 1
    assert "not finite" in again.err


def test_a_loss_that_jumps_is_refused(trained):
    done, run = trained("scaled", "--max-loss-jump", "50", "--on-loss-jump", "skip")
    assert done.code == 0, done
    assert "step 3 is skipped: guards.max_loss_jump must hold: |loss| is " in done.out
    assert checksums(run)[3] == checksums(run)[2]


def test_a_bound_that_nothing_jumps_beyond_changes_nothing(trained):
    plain, guarded = trained("scaled"), trained("scaled", "--max-loss-jump", "1e9", "--max-kl-jump", "1e9")
    assert checksums(plain[1]) == checksums(guarded[1])


def test_a_kl_that_jumps_is_refused(small, tmp_path):
    """Rollouts whose recorded log-probabilities are far from what the policy gives, in the fourth step alone."""
    assert strop("train", small.train, "--num-steps", "2", "--run.folder", tmp_path / "source").code == 0
    source = tmp_path / "source/rollouts"
    for step in (3, 4):
        shutil.copy(source / "step_000002.jsonl", source / f"step_{step:06d}.jsonl")
    rows = read_lines(source / "step_000004.jsonl")
    for row in rows:
        row["rollout_logprobs"] = [x - 3 for x in row["rollout_logprobs"]]
    (source / "step_000004.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--from-rollouts", source, "--max-kl-jump", "20", "--lr", "1e-4", "--run.folder", tmp_path / "run")
    done = strop("train", small.train, "--num-steps", "4", *flags)
    assert done.code == 1
    assert "stopped: guards.max_kl_jump must hold: |kl_old_policy_k3| is " in done.err
    assert len(metrics(tmp_path / "run")) == 3


def test_a_memory_that_is_resumed_refuses_what_it_would_have_refused(small, trained, tmp_path):
    """After two of its steps: without them the third loss would be held against nothing."""
    flags = ("--max-loss-jump", "50", "--on-loss-jump", "skip", "--checkpoint-every-steps", "2")
    _, whole = trained("scaled", *flags)
    done, part = trained("scaled", *flags, "--keep-checkpoints", "9", folder=tmp_path / "part")
    for step in (4, 5):
        shutil.rmtree(part / f"checkpoints/step_{step:06d}")
    done, part = trained("scaled", *flags, "--resume", folder=part)
    assert "step 3 is skipped" in done.out
    assert metrics(part) == metrics(whole)


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ("--on-non-finite", "rollback"),
            "guards.on_non_finite must be stop or skip with run.checkpoint_every_steps = 0",
        ),
        (("--on-loss-jump", "skip"), "guards.on_loss_jump = skip is only used when guards.max_loss_jump is set"),
        (("--max-kl-jump", "3", "--updates-per-batch", "1"), "guards.max_kl_jump = 3.0 cannot act"),
        (("--window-steps", "3"), "guards.window_steps = 3 is only used"),
        (("--max-rollbacks", "2"), "guards.max_rollbacks = 2 is only used"),
        (("--max-loss-jump", "1"), "guards.max_loss_jump must be greater than 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_of_guards_that_cannot_act_are_refused(small, tmp_path, flags, message):
    assert message in refusing(tmp_path)("train", small.train, *flags)
