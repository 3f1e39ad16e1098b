"""The run folder: what a run writes, and where."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from strop.trainers import has_adapters, merged, save_adapters
from strop.types import UserError

_REPLACED = ("config.toml", "objective.txt", "metrics.jsonl", "changes.jsonl", "rollouts", "guards", "checkpoints")
_REPLACED += ("report.html", "adapter", "profile")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_OF_EARLIER_RUN = ".of_earlier_run"  # a file in model/, best/ and critic/


class RunFolder:
    """Paths below one run folder; made and checked before any model is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.objective = path / "objective.txt"
        self.metrics = path / "metrics.jsonl"
        self.changes = path / "changes.jsonl"  # options that were changed when the run was resumed
        self.rollouts = path / "rollouts"
        self.guards = path / "guards"
        self.profile = path / "profile"  # traces of steps
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.best = path / "best"
        self.critic = path / "critic"
        self.adapter = path / "adapter"
        self.report = path / "report.html"

    def holds_run(self) -> bool:
        return self.holds_model() or any((self.path / name).exists() for name in _REPLACED)

    def holds_model(self) -> bool:
        return any(path.exists() for path in (self.model, self.best, self.critic))

    @contextmanager
    def held(self, *, overwrite: bool = False, resume: bool = False) -> Iterator[None]:
        """Around a whole run: the folder can be written, holds no other run, and nobody else writes to it meanwhile. Of a
        run that wrote nothing, nothing stays.

        Raises:
            UserError: it cannot be written, before the run or within it; another process writes to it; or it holds a run and
                neither `overwrite` nor `resume` is asked for.
        """
        made = [p for p in (self.path, *self.path.parents) if not p.exists()]
        lock = FileLock(self.path / ".lock")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout:
            raise UserError(
                f"run.folder = {str(self.path)!r} is being written by a run that is still going on. "
                "Wait for its end, or name another folder."
            ) from None
        except OSError as error:
            raise UserError(
                f"run.folder must be a folder that can be written, got {str(self.path)!r}: {error.strerror}."
            ) from None
        try:
            if self.holds_run() and not (resume or overwrite):
                raise UserError(
                    f"run.folder = {str(self.path)!r} holds a run already. Go on with --resume, replace it with "
                    "--run.overwrite, or name another folder."
                )
            with self._explaining():
                yield
        finally:
            Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()
            for path in made:  # deepest first
                if path.is_dir() and not any(path.iterdir()):
                    path.rmdir()

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """What the system says of a full disk, or of one of this folder's files, as an error of the folder."""
        try:
            yield
        except OSError as error:
            file = "" if error.filename is None else str(error.filename)
            if error.errno not in _FULL and not Path(file).is_relative_to(self.path):
                raise
            raise UserError(
                f"run.folder = {str(self.path)!r} cannot be written: {error.strerror}{file and f' ({file})'}. What was written "
                "before is there still."
            ) from error

    def clear(self) -> None:
        """Remove what an earlier run left, once the new one can begin. Its models stay, marked, until the new ones are
        written: the new run may have started from one of them."""
        for name in _REPLACED:
            target = self.path / name
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        for kept in (self.model, self.best, self.critic):
            if kept.is_dir():
                (kept / _OF_EARLIER_RUN).touch()

    def write_config(self, text: str) -> None:
        """config.toml, whole or absent; the first of a run's files."""
        beside = self.path / ".config.toml.new"
        beside.write_text(text, encoding="utf-8")
        beside.replace(self.config)

    def check_model(self, model: Path) -> None:
        """Raises UserError where `model/` or `best/`, whichever is given, is missing or is that of an earlier run."""
        is_there = model.is_dir() and not (model / _OF_EARLIER_RUN).exists()
        if not is_there and model == self.best:
            raise UserError(
                f"{self.path} keeps no best model of its run: no evaluation of it is made yet, or eval.keep_best = false. "
                f"{self.model} is the model at the end."
            )
        if not is_there:
            raise UserError(
                f"{self.path} holds no model of its run: it goes on still, or was killed before it could write one. "
                "strop train CONFIG --resume goes on from its newest checkpoint and writes it."
            )

    def drop_best_of_earlier_run(self) -> None:
        """Once the run that replaced it has a model of its own."""
        if (self.best / _OF_EARLIER_RUN).exists():
            shutil.rmtree(self.best)

    def write_model(self, model: Any, tokenizer: Any) -> None:
        """The model at the end as `model/`, adapters merged into it and alone as `adapter/`; raises as `write_critic`."""
        self._write(self.model, partial(_save_model, model, tokenizer, {}), "model")
        if has_adapters(model):
            self._write(self.adapter, partial(save_adapters, model), "adapter")

    def write_best(self, model: Any, tokenizer: Any, notes: Mapping[str, str]) -> None:
        """The model of the best step as `best/`, with the text of files about it; raises as `write_critic`."""
        self._write(self.best, partial(_save_model, model, tokenizer, notes), "best model")

    def write_critic(self, save: Callable[[Path], None] | None) -> None:
        """The critic, written by `save`; without one, that of an earlier run goes.

        Raises:
            UserError: it cannot be written; one that was there is there still.
        """
        if save is not None:
            self._write(self.critic, save, "critic")
        elif (self.critic / _OF_EARLIER_RUN).exists():
            shutil.rmtree(self.critic)

    def _write(self, target: Path, save: Callable[[Path], None], what: str) -> None:
        """A folder, complete or absent: written beside and renamed."""
        beside, old = (self.path / f".{target.name}.{word}" for word in ("new", "old"))
        try:
            for leftover in (beside, old):
                shutil.rmtree(leftover, ignore_errors=True)
            save(beside)
            if target.exists():
                target.rename(old)
            beside.rename(target)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(beside, ignore_errors=True)
            raise UserError(f"{target}: the {what} cannot be written: {error}.") from error
        shutil.rmtree(old, ignore_errors=True)


def _save_model(model: Any, tokenizer: Any, notes: Mapping[str, str], folder: Path) -> None:
    merged(model).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    for name, text in notes.items():
        (folder / name).write_text(text, encoding="utf-8")


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Raises OSError where the system does not let it be written, which the library says by an exception of no class."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(str(error)) from error
