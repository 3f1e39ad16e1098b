"""The run folder: what a run writes, and where."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from strop.types import UserError

_REPLACED = ("config.toml", "objective.txt", "metrics.jsonl", "rollouts", "checkpoints", "report.html")


class RunFolder:
    """Paths below one run folder; made and checked before any model is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.objective = path / "objective.txt"
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.report = path / "report.html"
        self._made: list[Path] = []  # folders that were not there, deepest first

    def holds_run(self) -> bool:
        return self.metrics.exists() or self.model.exists() or self.checkpoints.exists()

    @contextmanager
    def starting(self, *, overwrite: bool, resume: bool = False) -> Iterator[None]:
        """Around all that can fail before a run begins: the folder is checked first, an earlier run leaves it last, and of
        a run that never began nothing stays.

        Raises:
            UserError: as `_prepare`.
        """
        self._prepare(overwrite=overwrite, resume=resume)
        try:
            yield
            if overwrite and not resume:
                self._clear()
        except BaseException:
            self._remove_if_empty()
            raise

    def _prepare(self, *, overwrite: bool, resume: bool) -> None:
        """Make the folder and see that it can be written; refuse one that holds a run already.

        Raises:
            UserError: it cannot be written, or holds a run and neither `overwrite` nor `resume` is asked for.
        """
        self._made = [p for p in (self.path, *self.path.parents) if not p.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise UserError(
                f"run.folder must be a folder that can be written, got {str(self.path)!r}: {error.strerror}."
            ) from None
        if self.holds_run() and not (resume or overwrite):
            raise UserError(
                f"run.folder = {str(self.path)!r} holds a run already. Go on with --resume, replace it with "
                "--run.overwrite, or name another folder."
            )

    def _clear(self) -> None:
        """Remove what an earlier run left, once the new one can begin. Its model stays until the new one is written: the
        new run may have started from it."""
        for name in _REPLACED:
            target = self.path / name
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)

    def _remove_if_empty(self) -> None:
        """Leave nothing behind of a run that never began."""
        for path in self._made:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()

    def write_model(self, model: Any, tokenizer: Any) -> None:
        """A Hugging Face folder, complete or absent: written beside and renamed."""
        beside, old = self.path / ".model.new", self.path / ".model.old"
        for leftover in (beside, old):
            shutil.rmtree(leftover, ignore_errors=True)
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        if self.model.exists():
            self.model.rename(old)
        beside.rename(self.model)
        shutil.rmtree(old, ignore_errors=True)
