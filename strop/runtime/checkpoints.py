"""Checkpoints: a folder is complete or absent. Written beside, flushed, renamed; each file with its checksum."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from strop.types import UserError

_STATE = "run.json"


def write_checkpoint(
    folder: Path, step: int, *, save: Callable[[Path], None], state: dict[str, Any], keep: int
) -> Path:
    """Write `step_NNNNNN` and let the oldest go. `save` writes the trainer's files; `state` is the run's own.

    Raises:
        UserError: it cannot be written; those that were there are there still.
    """
    target, beside, old = (
        folder / name.format(step) for name in ("step_{:06d}", ".step_{:06d}.new", ".step_{:06d}.old")
    )
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        save(beside)
        for path in beside.iterdir():
            _flush(path)
        files = {path.name: _seen(path) for path in sorted(beside.iterdir())}
        whole = {"step": step, "files": files, **state}
        (beside / _STATE).write_text(json.dumps({"sha256": _digest(whole), **whole}, indent=1))
        _flush(beside / _STATE)
        if target.exists():  # a damaged one, whose step was made again
            target.rename(old)
        beside.rename(target)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise UserError(f"{target}: the checkpoint cannot be written: {error}.") from error
    shutil.rmtree(old, ignore_errors=True)
    _prune(folder, step, keep)
    return target


def _prune(folder: Path, step: int, keep: int) -> None:
    """Of the checkpoints up to `step` the newest `keep` that are whole stay. A later one is damaged, or the run would
    have gone on from it; it is replaced when its step is made again."""
    until = [path for path in _numbered(folder) if _step_of(path) <= step]
    whole = [path for path in until if not any(_faults(path, reads_files=False))]
    for path in set(until) - set(whole[-keep:]):
        shutil.rmtree(path)


def newest_checkpoint(folder: Path, *, warn: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint that is whole, and its state; a damaged one is passed over with a warning.

    Raises:
        UserError: there is none.
    """
    _finish_renaming(folder)
    found = find_checkpoint(folder, warn=warn)
    if found is None:
        raise UserError(f"{folder}: there is no complete checkpoint to resume from.")
    return found


def _finish_renaming(folder: Path) -> None:
    for old in folder.glob(".step_*.old"):  # stopped between the two renames
        target = folder / old.name[1:].removesuffix(".old")
        shutil.rmtree(old) if target.exists() else old.rename(target)


def find_checkpoint(
    folder: Path, *, warn: Callable[[str], None], until: int | None = None
) -> tuple[Path, dict[str, Any]] | None:
    """As `newest_checkpoint`, None where there is none; the folder is left as it is. `until`: of this step or earlier."""
    for path in reversed(_numbered(folder)):
        if until is not None and _step_of(path) > until:
            continue
        fault = next(_faults(path, reads_files=True), None)
        if fault is None:
            return path, json.loads((path / _STATE).read_text())
        warn(f"checkpoint {path.name} is passed over: {fault}.")
    return None


def _numbered(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    return sorted((path for path in folder.glob("step_*") if path.name[5:].isdigit()), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _faults(path: Path, *, reads_files: bool) -> Iterator[str]:
    try:
        state = json.loads((path / _STATE).read_text())
        files, written = dict(state["files"]), state.pop("sha256")
        _ = [state[name] for name in ("step", "cursor", "config", "num_steps")]
    except FileNotFoundError:
        yield f"{_STATE} is missing"
        return
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        yield f"{_STATE} is broken ({type(error).__name__}: {error})"
        return
    if _digest(state) != written or state["step"] != _step_of(path):
        yield f"{_STATE} is not what was written: its checksum or its step differs"
        return
    for name, seen in files.items():
        file = path / name
        if not file.is_file():
            yield f"{name} is missing"
        elif file.stat().st_size != seen["bytes"]:
            yield f"{name} has {file.stat().st_size} bytes, not {seen['bytes']}"
        elif reads_files and _seen(file) != seen:
            yield f"{name} is not what was written: its checksum differs"


def _digest(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _seen(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
