"""The run folder: whose it is, and whose model lies in it."""

import shutil

import pytest
from commands.small_runs import held, metrics, same_weights, small_once, strop
from forked import Command

from strop.runtime.run_folder import save_tokenizer


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


def test_a_second_run_in_the_folder_of_one_that_goes_on_is_refused_and_disturbs_nothing(small, tmp_path):
    function, go = held(tmp_path, 2)
    flags = ("--num-steps", "3", "--reward.function", function, "--run.folder", tmp_path / "run")
    flags = (*flags, "--checkpoint-every-steps", "1")
    with Command(tmp_path, "train", small.train, *flags) as going:
        going.until("step 1/3")
        for how in ("--resume", "--run.overwrite"):
            done = strop("train", small.train, *flags, how)
            assert done.code == 2, done
            assert "is being written by a run that is still going on" in done.err
        go.touch()
        assert going.wait() == 0, going.err
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3]
    assert strop("train", small.train, *flags, "--resume").code == 0  # free again
    assert not (tmp_path / "run/.lock").exists()


@pytest.mark.parametrize("name", ["config.toml", "rollouts", "report.html"])
def test_a_folder_that_holds_files_of_these_names_is_not_written_over(small, tmp_path, name):
    """Such as the folder with one's own config.toml, named by run.folder = "."."""
    (tmp_path / name).write_text("mine")
    done = strop("train", small.train, "--run.folder", tmp_path)
    assert done.code == 2
    assert "holds a run already" in done.err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "mine"}


def test_the_resolved_config_stands_for_the_same_run(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert strop("train", small.train, "--num-steps", "1").code == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["train"]
    done = strop("train", "runs/train/config.toml")
    assert done.code == 2
    assert "run.folder = 'runs/train' holds a run already" in done.err
    assert strop("train", "runs/train/config.toml", "--run.overwrite").code == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["train"]


def test_eval_of_a_run_that_has_written_no_model_is_refused(small, tmp_path):
    run = tmp_path / "run"
    assert strop("train", small.train, *small.eval_flags, "--num-steps", "1", "--run.folder", run).code == 0
    (run / "model").rename(tmp_path / "elsewhere")
    done = strop("eval", run)
    assert done.code == 2, done.out
    assert "holds no model of its run" in done.err
    assert strop("eval", run, "--model.path", tmp_path / "elsewhere").code == 0


def test_eval_does_not_take_the_model_of_the_run_that_was_there_before_for_that_of_the_run(small, tmp_path):
    """A new run in place of an old one, killed before its end: the old run's model is there still."""
    run = tmp_path / "run"
    assert strop("train", small.train, *small.eval_flags, "--num-steps", "1", "--run.folder", run).code == 0
    flags = ("--num-steps", "1000", "--reward.function", small.reward("slow"), "--run.folder", run, "--run.overwrite")
    with Command(tmp_path, "train", small.train, *small.eval_flags, *flags) as new:
        new.until("step    1/1000")
        new.kill()
    assert (run / "model/model.safetensors").exists()
    done = strop("eval", run)
    assert done.code == 2, done.out
    assert "holds no model of its run" in done.err
    last = ("--num-steps", "1", "--run.folder", run, "--run.overwrite")
    assert strop("train", small.train, *small.eval_flags, *last).code == 0
    assert strop("eval", run).code == 0
    assert not same_weights(run / "model", small.start)


def test_a_run_that_fails_in_its_first_step_for_what_one_can_mend_leaves_no_folder(small, tmp_path):
    """Mended, the same command runs."""
    flags = ("--reward.function", small.reward("raises"), "--run.folder", tmp_path / "run")
    assert strop("train", small.train, *flags).code == 2
    assert list(tmp_path.iterdir()) == []
    assert strop("train", small.train, "--run.folder", tmp_path / "run").code == 0


def test_a_run_that_fails_in_a_later_step_keeps_what_it_has_learned(small, tmp_path):
    (tmp_path / "later.py").write_text(
        "seen = []\n\ndef score(rollout):\n    seen.append(rollout)\n"
        "    return 1 / (len(seen) <= 16) if rollout.sample else 0.5\n"
    )
    done = strop(
        "train", small.train, "--reward.function", f"{tmp_path}/later.py:score", "--run.folder", tmp_path / "run"
    )
    assert done.code == 2
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1]
    assert not same_weights(tmp_path / "run/model", small.start)


@pytest.mark.parametrize("flags", [(), ("--checkpoint-every-steps", "9")], ids=["model", "checkpoint"])
def test_a_full_disk_at_the_end_is_one_message_and_the_report_is_there(small, tmp_path, flags, monkeypatch):
    """What cannot be written is not half there."""
    import transformers

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", full)
    done = strop("train", small.train, *flags, "--run.folder", tmp_path / "run")
    assert done.code == 2, done
    assert "the model cannot be written: [Errno 28] No space left on device" in done.err
    assert "Traceback" not in done.err
    found = {path.name for path in (tmp_path / "run").iterdir()}
    assert "report.html" in found
    assert found.isdisjoint({"model", ".model.new"})


@pytest.mark.parametrize("name", ["rollouts", "metrics.jsonl"])
def test_files_that_stand_in_the_way_are_one_message(small, tmp_path, name):
    run, flags = tmp_path / "run", ("--checkpoint-every-steps", "1", "--run.folder")
    assert strop("train", small.train, "--num-steps", "1", *flags, run).code == 0
    shutil.rmtree(run / "rollouts")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir() if name == "metrics.jsonl" else (run / "rollouts").write_text("mine")
    done = strop("train", small.train, "--num-steps", "2", *flags, run, "--resume")
    assert done.code == 2
    assert f"run.folder = '{run}' cannot be written: " in done.err
    assert f"({run / name}). What was written before is there still." in done.err


def test_a_tokenizer_that_the_system_does_not_let_be_written_is_an_error_of_the_system(tmp_path):
    class Tokenizer:
        def save_pretrained(self, folder):
            raise Exception("No space left on device (os error 28)")  # noqa: TRY002  as the library does

    with pytest.raises(OSError, match="No space left"):
        save_tokenizer(Tokenizer(), tmp_path)


def test_held_out_data_may_be_named_on_top_of_a_run_that_had_none(small, tmp_path):
    """Its config.toml says data = "none"."""
    run = tmp_path / "run"
    assert strop("train", small.train, "--num-steps", "1", "--run.folder", run).code == 0
    done = strop("eval", run, *small.eval_flags)
    assert done.code == 0, done.err
    done = strop("train", run / "config.toml", *small.eval_flags, "--run.folder", tmp_path / "again")
    assert done.code == 0, done.err
    assert "eval after step 1" in done.out
