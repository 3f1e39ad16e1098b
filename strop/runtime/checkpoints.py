"""Checkpoints: a folder is complete or absent. Written beside, flushed, renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from strop.types import UserError

_STATE = "run.json"


def write_checkpoint(
    folder: Path, step: int, *, save: Callable[[Path], None], state: dict[str, Any], keep: int
) -> Path:
    """Write `step_NNNNNN` and let the oldest go. `save` writes the trainer's files; `state` is the run's own."""
    target, beside = folder / f"step_{step:06d}", folder / f".step_{step:06d}.new"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    save(beside)
    sizes = {path.name: path.stat().st_size for path in sorted(beside.iterdir())}
    (beside / _STATE).write_text(json.dumps({"step": step, "files": sizes, **state}, indent=1))
    for path in beside.iterdir():
        _flush(path)
    if target.exists():
        shutil.rmtree(target)
    beside.rename(target)
    _flush(folder)
    for old in sorted(folder.glob("step_*"))[:-keep]:
        shutil.rmtree(old)
    return target


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def newest_checkpoint(folder: Path, *, warn: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint that is whole, and its state; a damaged one is passed over with a warning.

    Raises:
        UserError: there is none.
    """
    for path in sorted(folder.glob("step_*"), reverse=True):
        faults = list(_faults(path))
        if not faults:
            return path, json.loads((path / _STATE).read_text())
        warn(f"checkpoint {path.name} is passed over: {faults[0]}.")
    raise UserError(f"{folder}: there is no complete checkpoint to resume from.")


def _faults(path: Path) -> Iterator[str]:
    try:
        state = json.loads((path / _STATE).read_text())
        files, _ = state["files"], state["cursor"]
    except FileNotFoundError:
        yield f"{_STATE} is missing"
        return
    except (ValueError, KeyError, TypeError) as error:
        yield f"{_STATE} is broken ({type(error).__name__}: {error})"
        return
    for name, size in files.items():
        file = path / name
        if not file.exists():
            yield f"{name} is missing"
        elif file.stat().st_size != size:
            yield f"{name} has {file.stat().st_size} bytes, not {size}"
