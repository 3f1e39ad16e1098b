"""Which checkpoints stay: the newest, every M-th, the best; and an old one goes only after the new one is there."""

import pytest
from commands.sft_runs import validating, write_sft_small
from commands.small_runs import metrics, small_once, strop

from strop.runtime.checkpoints import Keep, find_checkpoint, write_checkpoint
from strop.types import UserError

STATE = {"cursor": {}, "config": {}, "num_steps": 99}


def write(folder, step, keep, best=None):
    def save(beside):
        (beside / "a").write_text("content")

    write_checkpoint(folder, step, save=save, state=STATE | {"best_step": best}, keep=keep)


def names(folder):
    return [int(path.name.removeprefix("step_")) for path in sorted(folder.iterdir())]


def test_the_newest_every_third_step_and_the_best_stay(tmp_path):
    for step in range(1, 9):
        best = 2 if step < 7 else 7
        write(tmp_path, step, Keep(2, every_steps=3, best=best), best)
        if step == 6:  # 3 and 6 for good, 5 and 6 as the newest, 2 as the best
            assert names(tmp_path) == [2, 3, 5, 6]
    assert names(tmp_path) == [3, 6, 7, 8]


def test_an_old_checkpoint_is_there_until_the_new_one_is_complete(tmp_path):
    write(tmp_path, 1, Keep(1))

    def save(beside):
        assert (
            names(tmp_path)[-1] == 1 if beside.name.startswith("step") else (tmp_path / "step_000001/run.json").exists()
        )
        (beside / "a").write_text("content")

    write_checkpoint(tmp_path, 2, save=save, state=STATE, keep=Keep(1))
    assert names(tmp_path) == [2]


def test_a_run_that_went_back_drops_later_checkpoints_once_it_has_written_one(tmp_path):
    for step in (2, 4, 6):
        write(tmp_path, step, Keep(9))
    write(tmp_path, 3, Keep(9, drops_later=True))
    assert names(tmp_path) == [2, 3]


@pytest.mark.parametrize("which, expected", [("newest", 6), ("best", 4), ("step_000002", 2)])
def test_a_checkpoint_is_found_by_what_resume_says(tmp_path, which, expected):
    for step in (2, 4, 6):
        write(tmp_path, step, Keep(9), best=4)
    assert find_checkpoint(tmp_path, which, warn=pytest.fail)[0].name == f"step_{expected:06d}"


@pytest.mark.parametrize(
    "which, best, says",
    [
        ("best", None, "knows of none. There are step_000002, step_000004"),
        (
            "best",
            3,
            "step_000003 cannot be resumed from: there is no such checkpoint. There are step_000002, step_000004",
        ),
        ("step_000009", None, "step_000009 cannot be resumed from: there is no such checkpoint"),
        ("step_000002", None, "step_000002 cannot be resumed from: a is missing"),
    ],
)
def test_a_checkpoint_that_is_asked_for_and_is_not_there_is_an_error_that_lists_those_that_are(
    tmp_path, which, best, says
):
    for step in (2, 4):
        write(tmp_path, step, Keep(9), best=best)
    (tmp_path / "step_000002/a").unlink()
    with pytest.raises(UserError, match=says):
        find_checkpoint(tmp_path, which, warn=pytest.fail)


def test_a_run_keeps_every_third_and_the_best_and_goes_on_from_the_best(tmp_path, tmp_path_factory):
    small, run = small_once(tmp_path_factory), tmp_path / "run"
    flags = ("--checkpoint-every-steps", "5", "--keep-checkpoints", "1", "--keep-every-steps", "3", "--lr", "0.05")
    flags = (*flags, "--keep-best-checkpoint", "--eval.every_steps", "1", *small.eval_flags, "--run.folder", run)
    done = strop("train", small.train, *flags, "--num-steps", "7")
    assert done.code == 0, done.err
    found = {row["step"]: row["eval/sampled_reward"] for row in metrics(run)}
    best = max((step for step in found if step > 0), key=lambda step: (found[step], -step))
    assert found[best] > found[0]
    assert names(run / "checkpoints") == sorted({3, 6, 7, best})
    again = strop("train", small.train, *flags, "--num-steps", str(best + 1), "--resume", "best")
    assert again.code == 0, again.err
    assert f"resumed from {run}/checkpoints/step_{best:06d} after step {best}" in again.out
    assert max(names(run / "checkpoints")) == best + 1  # the later ones belong to what was left
    assert metrics(run)[-1]["step"] == best + 1


def test_sft_keeps_the_checkpoint_of_its_best_validation(tmp_path):
    small, run = write_sft_small(tmp_path / "small"), tmp_path / "run"
    flags = (
        *validating(small),
        "--lr",
        "0.1",
        "--num-steps",
        "4",
        "--checkpoint-every-steps",
        "4",
        "--keep-checkpoints",
        "1",
    )
    flags = (*flags, "--keep-best-checkpoint", "true", "--run.folder", run)
    assert strop("sft", small / "sft.toml", *flags).code == 0
    losses = {row["step"]: row["validation/loss"] for row in metrics(run) if "validation/loss" in row}
    best = min((step for step in losses if step > 0), key=lambda step: losses[step])
    assert best < 4
    assert names(run / "checkpoints") == [best, 4]
    again = strop("sft", small / "sft.toml", *flags, "--resume", "best")
    assert f"step_{best:06d} after step {best}" in again.out, again.err


def test_keeping_the_best_needs_something_to_compare_by(tmp_path, tmp_path_factory):
    small = small_once(tmp_path_factory)
    flags = ("--checkpoint-every-steps", "1", "--keep-best-checkpoint", "--run.folder", tmp_path / "run")
    done = strop("train", small.train, *flags)
    assert done.code == 2
    assert "run.keep_best_checkpoint = True is only used with held-out prompts" in done.err
    assert (
        "run.keep_best_checkpoint = True is only used with held-out demonstrations"
        in strop("sft", small.sft, *flags).err
    )
