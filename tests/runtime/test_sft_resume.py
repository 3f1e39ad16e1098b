"""strop sft goes on as if it had not stopped: bit for bit, the best model and its patience included."""

import json
import re
import shutil
import signal

import pytest
from commands.sft_runs import validating, write_sft_small
from commands.small_runs import metrics, same_weights, small_once, strop
from forked import Command


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_sft_small(tmp_path_factory.mktemp("sft"))


@pytest.fixture(scope="module")
def flags(small):
    """Everything that a checkpoint could forget; a rate so high that the best model is not the last."""
    schedule = ("--lr", "0.05", "--lr-schedule", "linear", "--warmup-steps", "1", "--weight-decay", "0.1")
    length = ("--num-steps", "none", "--num-epochs", "2", "--batch-size", "5")  # 8 steps, the last one on one row
    checkpoints = ("--checkpoint-every-steps", "1", "--keep-checkpoints", "99")
    return (*validating(small), *schedule, *length, *checkpoints, "--validation.patience", "9")


@pytest.fixture(scope="module")
def whole(small, flags, tmp_path_factory):
    run = tmp_path_factory.mktemp("whole") / "run"
    done = strop("sft", small / "sft.toml", *flags, "--run.folder", run)
    assert done.code == 0, done.err
    assert len(list((run / "checkpoints").iterdir())) == 8
    return run


@pytest.fixture
def stopped(small, flags, whole, tmp_path):
    """The run folder as it was right after some step."""

    def at(step):
        run = tmp_path / "run"
        shutil.copytree(whole, run)
        shutil.rmtree(run / "model")
        for later in range(step + 1, 9):
            shutil.rmtree(run / f"checkpoints/step_{later:06d}")
        lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(lines[: step + 1]))
        state = json.loads((run / f"checkpoints/step_{step:06d}/run.json").read_text())
        best = state["validation"]["best"]
        (run / "best/best.json").write_text(json.dumps({"step": best["step"], "validation_loss": best["loss"]}))
        return run

    return at


def resume(small, flags, run, *more):
    return strop("sft", small / "sft.toml", *flags, *more, "--run.folder", run, "--resume")


def changed(flags, values):
    """The flags with other values for some of them."""
    names = ("", *flags)
    return tuple(values.get(str(name), value) for name, value in zip(names, flags, strict=False))


@pytest.mark.parametrize("step", [1, 4, 7])
def test_some_steps_then_resuming_equals_all_steps_at_once(small, flags, whole, stopped, step):
    run = stopped(step)
    done = resume(small, flags, run)
    assert done.code == 0, done.err
    assert f"resumed from {run}/checkpoints/step_{step:06d} after step {step}" in done.out
    assert metrics(run) == metrics(whole)
    assert same_weights(run / "model", whole / "model")
    assert same_weights(run / "best", whole / "best")
    assert (run / "best/best.json").read_text() == (whole / "best/best.json").read_text()
    for file in ("weights.safetensors", "optimizer.safetensors", "trainer.json", "run.json"):
        last = "checkpoints/step_000008"
        assert (run / last / file).read_bytes() == (whole / last / file).read_bytes(), file


def test_the_best_model_is_remembered_over_a_resume(small, flags, whole, stopped):
    """Once the best step has passed, a resumed run does not take a worse model for the best."""
    best = json.loads((whole / "best/best.json").read_text())["step"]
    assert best < 8
    run = stopped(7)
    before = (run / "best/model.safetensors").stat().st_mtime_ns
    assert resume(small, flags, run).code == 0
    assert (run / "best/model.safetensors").stat().st_mtime_ns == before


def test_patience_counts_on_over_a_resume_and_a_run_that_has_lost_it_has_nothing_left_to_do(small, tmp_path):
    worse = ("--validation.data.path", small / "held_out.jsonl", "--validation.every_steps", "1", "--lr", "5")
    worse = (*worse, "--checkpoint-every-steps", "1", "--validation.patience", "3", "--run.folder", tmp_path / "run")
    assert strop("sft", small / "sft.toml", *worse, "--num-steps", "2").code == 0
    done = strop("sft", small / "sft.toml", *worse, "--num-steps", "9", "--resume")
    assert done.code == 0, done.err
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2, 3]
    again = strop("sft", small / "sft.toml", *worse, "--num-steps", "9", "--resume")
    assert "warning: nothing is left to do: step 3 of 9 is made" in again.out
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2, 3]


def test_more_epochs_go_on_after_a_last_batch_that_was_small(small, flags, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    done = resume(small, changed(flags, {"--num-epochs": "3"}), run)
    assert done.code == 0, done.err
    assert "warning: the run has 12 steps and had 8: the linear schedule ends later or earlier" in done.out
    assert [row["epoch"] for row in metrics(run)[-4:]] == pytest.approx([2 + n / 18 for n in (5, 10, 15, 18)])


@pytest.mark.parametrize(
    "length, asked",
    [
        ({"--num-epochs": "1"}, "run.num_epochs = 1"),
        ({"--num-epochs": "1", "--num-steps": "3"}, "run.num_steps = 3"),
    ],
)
def test_a_run_that_is_resumed_with_fewer_steps_than_it_has_made_says_so_and_changes_nothing(
    small, flags, whole, tmp_path, length, asked
):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    done = resume(small, changed(flags, length), run)
    assert done.code == 0, done.err
    said = f"nothing is left to do: 8 steps are made, and {asked} asks for fewer. The model stays that of step 8."
    assert said in done.out
    assert same_weights(run / "model", whole / "model")
    assert metrics(run) == metrics(whole)


def test_a_run_that_goes_on_without_validation_keeps_the_best_model_and_what_is_known_of_it(
    small, flags, whole, stopped
):
    """And goes on with the validation again as if it had always had one."""
    run = stopped(4)
    best = json.loads((run / "best/best.json").read_text())
    bare = flags[len(validating(small)) : -2]
    done = resume(small, changed(bare, {"--num-epochs": "1"}), run)  # nothing is left to do
    assert done.code == 0, done.err
    named = f"best (after step {best['step']}, validation loss {best['validation_loss']:.4f}): {run}/best"
    assert named in done.out
    done = resume(small, bare, run)
    assert done.code == 0, done.err
    assert named in done.out
    state = json.loads((run / "checkpoints/step_000008/run.json").read_text())
    then = json.loads((whole / "checkpoints/step_000004/run.json").read_text())
    assert state["validation"] == then["validation"]
    done = resume(small, flags, run)
    assert "is forgotten" not in done.out
    assert named in done.out


def test_a_run_without_validation_that_gets_one_has_nothing_to_forget(small, tmp_path):
    flags = ("--checkpoint-every-steps", "1", "--run.folder", tmp_path / "run", "--num-steps")
    assert strop("sft", small / "sft.toml", *flags, "1").code == 0
    done = strop("sft", small / "sft.toml", *flags, "2", *validating(small), "--resume")
    assert done.code == 0, done.err
    assert "forgotten" not in done.out
    assert "best (after step 2, " in done.out


def test_an_interrupted_run_writes_a_checkpoint_and_its_rest_gives_what_the_whole_run_gives(small, tmp_path):
    run, flags = tmp_path / "run", ("--checkpoint-every-steps", "100000", "--num-steps")
    with Command(tmp_path, "sft", small / "sft.toml", *flags, "100000", "--run.folder", run) as command:
        command.until("step")
        command.send_signal(signal.SIGINT)
        assert command.wait() == 130, command.err
    made = int(re.search(r"interrupted after step (\d+); saving", command.out)[1])
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{made:06d}"]
    total = str(made + 3)
    assert strop("sft", small / "sft.toml", *flags, total, "--run.folder", run, "--resume").code == 0
    assert strop("sft", small / "sft.toml", "--num-steps", total, "--run.folder", tmp_path / "whole").code == 0
    assert same_weights(run / "model", tmp_path / "whole/model")
    assert metrics(run) == metrics(tmp_path / "whole")


def test_a_guard_that_stops_a_step_leaves_a_checkpoint_of_the_step_before(small, tmp_path):
    """A rate so high that the second forward pass overflows."""
    flags = ("--lr", "1e20", "--checkpoint-every-steps", "100", "--run.folder", tmp_path / "run")
    done = strop("sft", small / "sft.toml", *flags)
    assert done.code == 1
    assert "loss or gradient is not finite" in done.err
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_000001"]


# ---- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more, said",
    [
        (("--beta1", "0.8"), "trainer.beta1 must be 0.9 as in the run that is resumed, got 0.8"),
        (("--reduction", "sequence_mean"), 'loss.reduction must be "token_mean" as in the run that is resumed'),
        (("--train-on", "last"), 'data.train_on must be "assistant" as in the run that is resumed'),
        (("--seed", "1"), "seed must be 0 as in the run that is resumed, got 1"),
    ],
)
def test_a_resumed_run_must_be_the_same_run(small, flags, stopped, more, said):
    done = resume(small, flags, stopped(2), *more)
    assert done.code == 2
    assert said in done.err


def test_other_demonstrations_are_refused_and_other_held_out_ones_are_said(small, flags, stopped, tmp_path):
    lines = (small / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "other.jsonl").write_text("".join(reversed(lines)))
    run = stopped(4)
    done = resume(small, flags, run, "--data.path", tmp_path / "other.jsonl")
    assert done.code == 2
    assert "data: the demonstrations are not those that" in done.err
    others = tuple(tmp_path / "other.jsonl" if flag == small / "held_out.jsonl" else flag for flag in flags)
    done = resume(small, others, run)
    assert done.code == 0, done.err
    assert "warning: validation.data is not what it was: which model was best until now is forgotten." in done.out


def test_a_folder_of_strop_train_is_not_resumed(small, tmp_path, tmp_path_factory):
    other = small_once(tmp_path_factory)
    flags = ("--num-steps", "1", "--checkpoint-every-steps", "1", "--run.folder", tmp_path / "run")
    assert strop("train", other.train, *flags).code == 0
    done = strop("sft", small / "sft.toml", "--run.folder", tmp_path / "run", "--resume")
    assert done.code == 2
    assert "is of strop train" in done.err
