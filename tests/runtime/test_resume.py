"""A run that stops goes on as if it had not: bit for bit, from the newest checkpoint that is whole."""

import errno
import json
import shutil
import signal

import pytest
from commands.small_runs import held, metrics, read_lines, same_weights, small_once, strop
from forked import Command

from strop.runtime.checkpoints import Keep, newest_checkpoint, write_checkpoint
from strop.types import UserError


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


# Everything that a checkpoint could forget: moments, the schedule, the reference, the place in shuffled data.
FLAGS = ("--num-steps", "4", "--checkpoint-every-steps", "1", "--keep-checkpoints", "4", "--coef", "0.1")
FLAGS = (*FLAGS, "--lr-schedule", "cosine", "--warmup-steps", "2", "--weight-decay", "0.1")


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    """A run of four steps with a checkpoint after each."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert strop("train", small.train, *FLAGS, "--run.folder", run).code == 0
    return run


@pytest.fixture
def stopped(whole, tmp_path):
    """The run folder as it was after some step: its checkpoints up to there, and a line of metrics more."""

    def at(step):
        run = tmp_path / "run"
        shutil.copytree(whole, run)
        shutil.rmtree(run / "model")
        for later in range(step + 1, 5):
            shutil.rmtree(run / f"checkpoints/step_{later:06d}")
        lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(lines[: step + 1])[:-20])  # the last line cut short by a crash
        return run

    return at


def resume(small, run, *flags):
    return strop("train", small.train, *FLAGS, "--run.folder", run, "--resume", *flags)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_some_steps_then_resuming_equals_all_steps_at_once(small, whole, stopped, step):
    run = stopped(step)
    done = resume(small, run)
    assert done.code == 0, done.err
    assert f"resumed from {run}/checkpoints/step_{step:06d} after step {step}" in done.out
    lines = [line.split()[1] for line in done.out.splitlines() if line.startswith("step ")]
    assert lines == [f"{n}/4" for n in range(step + 1, 5)]
    assert same_weights(run / "model", whole / "model")
    assert metrics(run) == metrics(whole)
    for file in ("weights.safetensors", "optimizer.safetensors", "trainer.json", "run.json"):
        last = "checkpoints/step_000004"
        assert (run / last / file).read_bytes() == (whole / last / file).read_bytes(), file


def test_the_data_goes_on_where_it_stopped_over_the_end_of_an_epoch(small, tmp_path):
    """Case 28: 6 prompts, 4 a step; every step takes rows of the next epoch."""
    flags = ("--data.max_prompts", "6", "--checkpoint-every-steps", "1", "--keep-checkpoints", "9")
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert strop("train", small.train, *flags, "--num-steps", "4", "--run.folder", whole).code == 0
    assert strop("train", small.train, *flags, "--num-steps", "2", "--run.folder", part).code == 0
    assert strop("train", small.train, *flags, "--num-steps", "4", "--run.folder", part, "--resume").code == 0
    rows = [
        [[r["prompt_row"] for r in read_lines(run / f"rollouts/step_{n:06d}.jsonl")[::4]] for n in (1, 2, 3, 4)]
        for run in (whole, part)
    ]
    assert rows[0] == rows[1]
    taken = [row for step in rows[0] for row in step]
    assert sorted(taken[:6]) == sorted(taken[6:12]) == [0, 1, 2, 3, 4, 5]
    assert same_weights(whole / "model", part / "model")


def test_a_killed_process_resumes_as_if_it_had_not_been_killed(small, tmp_path):
    run = tmp_path / "run"
    function, go = held(tmp_path, 4)
    slow = ("--reward.function", function, "--run.folder", run)
    flags = ("--num-steps", "6", "--checkpoint-every-steps", "2", "--lr-schedule", "linear")
    with Command(tmp_path, "train", small.train, *slow, *flags) as command:
        command.until("step 3/6")
        assert command.kill() == -signal.SIGKILL
    assert not (run / "model").exists()
    go.touch()
    done = strop("train", small.train, *slow, *flags, "--resume")
    assert done.code == 0, done.err
    assert "resumed from" in done.out
    assert strop("train", small.train, *flags, "--run.folder", tmp_path / "whole").code == 0
    assert same_weights(run / "model", tmp_path / "whole/model")
    assert metrics(run) == metrics(tmp_path / "whole")


# ---- damage ---------------------------------------------------------------------------------------------------------


def _truncated_weights(checkpoint):
    file = checkpoint / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _without(name):
    def damage(checkpoint):
        (checkpoint / name).unlink()

    return damage


def _emptied(checkpoint):
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


def _without_cursor(checkpoint):
    state = json.loads((checkpoint / "run.json").read_text())
    del state["cursor"]
    (checkpoint / "run.json").write_text(json.dumps(state))


def _half_written_state(checkpoint):
    text = (checkpoint / "run.json").read_text()
    (checkpoint / "run.json").write_text(text[: len(text) // 2])


def _one_bit_of_weights(checkpoint):
    file = checkpoint / "weights.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def _one_bit_of_the_state(checkpoint):
    path = checkpoint / "run.json"
    path.write_text(path.read_text().replace('"step": 3', '"step": 7', 1))


@pytest.mark.parametrize(
    "damage, reason",
    [
        (_one_bit_of_the_state, "run.json is not what was written"),
        (_one_bit_of_weights, "weights.safetensors is not what was written"),
        (_truncated_weights, "weights.safetensors has"),
        (_without("optimizer.safetensors"), "optimizer.safetensors is missing"),
        (_without("trainer.json"), "trainer.json is missing"),
        (_emptied, "run.json is missing"),
        (_without_cursor, "cursor"),
        (_half_written_state, "run.json is broken"),
        (lambda checkpoint: (checkpoint / "run.json").write_text("null"), "run.json is broken"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning_that_names_it_and_why(
    small, whole, stopped, damage, reason
):
    """Case 29."""
    run = stopped(3)
    damage(run / "checkpoints/step_000003")
    done = resume(small, run)
    assert done.code == 0, done.err
    (warning,) = [line for line in done.out.splitlines() if line.startswith("warning: ")]
    assert "checkpoint step_000003 is passed over" in warning
    assert reason in warning
    assert f"resumed from {run}/checkpoints/step_000002" in done.out
    assert same_weights(run / "model", whole / "model")
    assert metrics(run) == metrics(whole)


def test_a_checkpoint_that_was_being_written_is_no_checkpoint(small, whole, stopped):
    run = stopped(3)
    (run / "checkpoints/step_000003").rename(run / "checkpoints/.step_000003.new")
    assert f"resumed from {run}/checkpoints/step_000002" in resume(small, run).out
    assert same_weights(run / "model", whole / "model")
    assert not (run / "checkpoints/.step_000003.new").exists()  # step 3 was written again over the leftover


def test_after_passing_over_a_damaged_checkpoint_the_good_ones_stay_until_there_are_enough(small, stopped):
    """The damaged one has the higher number: it must not be counted, and what is written must not be let go for it."""
    run = stopped(3)
    shutil.rmtree(run / "checkpoints/step_000001")
    _truncated_weights(run / "checkpoints/step_000003")
    (run / "checkpoints/step_000003").rename(run / "checkpoints/step_000009")
    flags = (*FLAGS[2:4], *FLAGS[6:], "--keep-checkpoints", "1", "--num-steps", "3")
    done = strop("train", small.train, *flags, "--run.folder", run, "--resume")
    assert done.code == 0, done.err
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step_000003", "step_000009"]
    again = strop("train", small.train, *flags, "--run.folder", run, "--resume")
    assert "resumed from" in again.out, again.err
    assert "step_000003 after step 3" in again.out


def test_a_write_stopped_between_its_two_renames_leaves_the_earlier_checkpoint(small, whole, stopped):
    run = stopped(3)
    (run / "checkpoints/step_000003").rename(run / "checkpoints/.step_000003.old")
    assert f"resumed from {run}/checkpoints/step_000003" in resume(small, run).out
    assert same_weights(run / "model", whole / "model")
    assert not list((run / "checkpoints").glob(".*"))


def test_a_checkpoint_that_cannot_be_written_stops_the_run_and_leaves_the_ones_before_it(tmp_path):
    state = {"cursor": {}, "objective": {}, "prompts": "", "config": {}, "num_steps": 9}
    write_checkpoint(tmp_path, 1, save=lambda f: (f / "a").write_text("one"), state=state, keep=Keep(1))

    def full(folder):
        (folder / "a").write_text("tw")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match=r"step_000002: the checkpoint cannot be written: .*No space left"):
        write_checkpoint(tmp_path, 2, save=full, state=state, keep=Keep(1))
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    assert newest_checkpoint(tmp_path, warn=pytest.fail)[0].name == "step_000001"


# ---- what cannot be resumed -----------------------------------------------------------------------------------------


def test_resuming_where_there_is_no_checkpoint_is_refused_and_leaves_nothing(small, tmp_path):
    done = resume(small, tmp_path / "run")
    assert done.code == 2
    assert f"error: {tmp_path}/run/checkpoints: there is no complete checkpoint to resume from" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "flags, says",
    [
        (("--data.max_prompts", "32"), ["data.max_prompts must be 64", "got 32"]),
        (("--seed", "5"), ["seed must be 0 as in the run that is resumed, got 5"]),
        (("--data.shuffle", "false"), ["data.shuffle must be true", "got false"]),
        (("--lr", "0.02"), ["trainer.lr must be 0.01", "got 0.02"]),
        (("--eps-clip", "0.3"), ["algorithm.policy_loss.eps_clip must be 0.2", "got 0.3"]),
        (
            ("--algorithm.policy_loss.kind", "cispo", "--beta1=0.8"),
            ["algorithm.policy_loss.kind must be", "trainer.beta1 must be"],
        ),
    ],
)
def test_resuming_with_another_config_is_refused_and_leaves_the_run_as_it_was(small, stopped, flags, says):
    run = stopped(2)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = resume(small, run, *flags)
    assert done.code == 2, done.out
    assert [part for part in says if part not in done.err] == [], done.err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_what_changes_no_step_may_change_when_a_run_is_resumed(small, whole, stopped):
    run = stopped(2)
    flags = ("--max-tokens-per-micro-batch", "64", "--max-logprob-gap", "1", "--save-rollouts", "false")
    done = resume(small, run, *flags)
    assert done.code == 0, done.err
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4]


def test_a_resumed_run_that_shall_be_longer_says_what_becomes_of_its_schedule(small, stopped):
    done = strop("train", small.train, *FLAGS[2:], "--num-steps", "5", "--run.folder", stopped(2), "--resume")
    assert done.code == 0, done.err
    assert "warning: the run has 5 steps and had 4: the cosine schedule ends later" in done.out


def test_resuming_with_prompts_of_other_content_is_refused(small, stopped, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text("".join(reversed((small.folder / "train.jsonl").read_text().splitlines(keepends=True))))
    done = resume(small, stopped(2), "--data.path", other)
    assert done.code == 2
    assert "the prompts are not those that" in done.err


def test_resuming_with_prompts_of_other_metadata_is_refused(small, stopped, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text((small.folder / "train.jsonl").read_text().replace("}\n", ', "metadata": {"x": 1}}\n'))
    done = resume(small, stopped(2), "--data.path", other)
    assert done.code == 2
    assert "the prompts are not those that" in done.err


def test_a_scorer_that_was_edited_is_said_when_a_run_is_resumed(small, tmp_path):
    scorer, run = tmp_path / "mine.py", tmp_path / "run"
    flags = ("--reward.function", f"{scorer}:score", "--run.folder", run, "--checkpoint-every-steps", "1")
    scorer.write_text("def score(rollout):\n    return len(rollout.text)\n")
    assert strop("train", small.train, *flags, "--num-steps", "1").code == 0
    again = strop("train", small.train, *flags, "--num-steps", "2", "--resume")
    assert "warning: the file of reward.function" not in again.out
    scorer.write_text("def score(rollout):\n    return 2 * len(rollout.text)\n")
    again = strop("train", small.train, *flags, "--num-steps", "3", "--resume")
    assert again.code == 0
    assert "warning: the file of reward.function has changed" in again.out


@pytest.mark.parametrize(
    "damage", ['{"step": 3, "rew\n', '{"step": "3"}\n', "[1]\n", "7\n", "\udcff\n", "[" * 99999 + "\n"]
)
def test_damaged_lines_of_metrics_do_not_keep_a_run_from_going_on(small, whole, stopped, damage):
    run = stopped(2)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0] + damage, errors="surrogateescape")
    done = resume(small, run)
    assert done.code == 0, done.err
    assert "warning: metrics.jsonl has lines of 1 of the 2 steps made" in done.out
    assert [row["step"] for row in metrics(run)] == [1, 3, 4]


def test_a_run_with_nothing_left_to_do_says_so(small, stopped):
    done = strop("train", small.train, *FLAGS[2:], "--num-steps", "2", "--run.folder", stopped(3), "--resume")
    assert done.code == 0, done.err
    assert "warning: nothing is left to do: step 3 of run.num_steps = 2 is made" in done.out


def test_the_reference_is_the_one_that_the_run_began_with_even_where_its_folder_has_changed(
    small, whole, stopped, tmp_path
):
    """A run may start from the model/ of its own folder, and has replaced it by the time it is resumed."""
    run, start = stopped(2), tmp_path / "start"
    shutil.copytree(small.start, start)
    shutil.copy(whole / "model/model.safetensors", start)
    assert resume(small, run, "--model.path", start).code == 0
    assert metrics(run) == metrics(whole)
    assert same_weights(run / "model", whole / "model")


def test_resuming_with_a_model_of_another_shape_is_refused_and_leaves_the_run_as_it_was(small, stopped, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    config = AutoModelForCausalLM.from_pretrained(small.start).config
    config.intermediate_size = 48
    LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(small.start).save_pretrained(tmp_path / "other")
    run = stopped(2)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = resume(small, run, "--model.path", tmp_path / "other")
    assert done.code == 2
    assert "weights do not fit the model" in done.err
    assert "(32, 64) for (32, 48)" in done.err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


# ---- how many stay --------------------------------------------------------------------------------------------------


def test_only_the_newest_checkpoints_stay_and_the_last_step_always_has_one(small, tmp_path):
    flags = ("--num-steps", "5", "--checkpoint-every-steps", "2", "--run.folder", tmp_path / "run")
    assert strop("train", small.train, *flags).code == 0
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == ["step_000004", "step_000005"]


def test_a_finished_run_resumed_is_left_as_it_was(small, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    done = resume(small, run)
    assert done.code == 0
    assert [line for line in done.out.splitlines() if line.startswith("step ")] == []
    assert same_weights(run / "model", whole / "model")
    assert (run / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()
