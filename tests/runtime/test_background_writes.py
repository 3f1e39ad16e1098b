"""A checkpoint is written while the run goes on: it holds what was copied, and the loop waits for the copy alone."""

import threading
import time

import pytest
import tiny_models
import torch
from commands.small_runs import metrics, same_weights, small_once
from safetensors.torch import load_file

import strop
from strop.config import TorchTrainerOptions
from strop.observe.console import QuietConsole
from strop.runtime import resume
from strop.runtime.checkpoints import newest_checkpoint, write_checkpoint
from strop.runtime.writer import CheckpointWriter
from strop.trainers import TorchTrainer
from strop.types import UserError


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


def config_of(small, run, **options):
    return strop.load_config(small.train, {"run.folder": str(run), "run.checkpoint_every_steps": 1, **options})


def test_a_snapshot_is_of_when_it_was_taken_whatever_the_trainer_does_until_it_is_written(tmp_path):
    trainer = TorchTrainer(tiny_models.llama(), TorchTrainerOptions(), total_steps=9, keeps_reference=True)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    write = trainer.snapshot()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(1.0)
    trainer.refresh_reference()
    write(tmp_path)
    for file in ("weights.safetensors", "reference.safetensors"):
        written = load_file(tmp_path / file)
        assert all(written[name].equal(before[name]) for name in before), file


def slow_writes(monkeypatch, wait):
    """Writes begin with a wait of their own; returns what was done, as it was done."""
    done = []

    def slowly(folder, step, **options):
        done.append(f"write {step}")
        wait()
        write_checkpoint(folder, step, **options)
        done.append(f"written {step}")

    monkeypatch.setattr(resume, "write_checkpoint", slowly)
    return done


class Watching(QuietConsole):
    """Says so when a phase of the n-th step begins."""

    def __init__(self, phase, step):
        super().__init__()
        self.has_begun, self._phase, self._left = threading.Event(), phase, step

    def phase(self, name, total, **more):
        self._left -= name == self._phase
        if self._left == 0:
            self.has_begun.set()
        return super().phase(name, total, **more)


def test_the_next_step_is_made_while_a_checkpoint_is_written(small, tmp_path, monkeypatch):
    """Writing that of step 2 ends after step 3 has begun. The loop waited for the copy alone, and says how long."""
    console = Watching("sample", 3)
    waited = []
    slow_writes(monkeypatch, lambda: waited.append(console.has_begun.wait(30)))
    config = config_of(small, tmp_path / "run", **{"run.checkpoint_every_steps": 2, "run.num_steps": 3})
    result = strop.train(config, console=console)
    assert waited == [True, True]
    assert result.steps[1]["seconds/checkpoint"] < 20
    assert "seconds/checkpoint" not in result.steps[2]
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step_000002", "step_000003"]


def test_a_run_is_not_over_before_the_checkpoint_of_its_end_is_written(small, tmp_path, monkeypatch):
    """None is due on the way: the one that is written when the run stops."""
    slow_writes(monkeypatch, lambda: time.sleep(0.3))
    strop.train(config_of(small, tmp_path / "run", **{"run.checkpoint_every_steps": 9, "run.num_steps": 1}))
    assert newest_checkpoint(tmp_path / "run/checkpoints", warn=pytest.fail)[0].name == "step_000001"


def test_the_next_checkpoint_and_the_end_of_the_run_wait_for_the_one_that_is_being_written(
    small, tmp_path, monkeypatch
):
    console = Watching("train", 2)

    def wait():
        console.has_begun.wait(30)
        time.sleep(0.5)

    done = slow_writes(monkeypatch, wait)
    config = config_of(small, tmp_path / "run", **{"run.num_steps": 2})
    result = strop.train(config, console=console)
    assert done == ["write 1", "written 1", "write 2", "written 2"]
    assert result.steps[1]["seconds/checkpoint"] > 0
    newest, state = newest_checkpoint(tmp_path / "run/checkpoints", warn=pytest.fail)
    assert (newest.name, state["step"]) == ("step_000002", 2)
    assert [t.name for t in threading.enumerate() if t.name.startswith("checkpoint")] == []
    other = config_of(small, tmp_path / "other", **{"run.num_steps": 2})
    strop.train(other)
    assert same_weights(tmp_path / "run/model", tmp_path / "other/model")


def test_a_write_that_failed_ends_the_run_at_the_next_step_and_the_checkpoint_before_it_is_there(
    small, tmp_path, monkeypatch
):
    """As where the disk is full for a while; the run then resumes to what it would have been."""

    def fails_at_2(folder, step, **options):
        if step >= 2:
            raise UserError("the disk is full")
        return write_checkpoint(folder, step, **options)

    monkeypatch.setattr(resume, "write_checkpoint", fails_at_2)
    config = config_of(small, tmp_path / "run", **{"run.num_steps": 5})
    with pytest.raises(UserError, match="the disk is full"):
        strop.train(config)
    made = [row["step"] for row in metrics(tmp_path / "run")]
    assert made in ([1, 2], [1, 2, 3])  # 3: the write had not failed when step 2 was over
    assert newest_checkpoint(tmp_path / "run/checkpoints", warn=pytest.fail)[0].name == "step_000001"
    monkeypatch.undo()
    strop.train(config, resume=True)
    strop.train(config_of(small, tmp_path / "whole", **{"run.num_steps": 5}))
    assert same_weights(tmp_path / "run/model", tmp_path / "whole/model")


def test_a_writer_raises_an_error_once_and_forgets_the_step_that_was_not_written():
    writer = CheckpointWriter()
    writer.start(1, lambda: None)
    writer.wait()

    def fail():
        raise UserError("full")

    writer.start(2, fail)
    with pytest.raises(UserError, match="full"):
        writer.wait()
    writer.check()
    writer.wait()
    assert writer.saved_step == 1
