"""Checkpoints: a folder is complete or absent. Written beside, flushed, renamed; each file with its checksum.

There is no pointer to the latest one, which could be wrong: it is the whole one with the highest number."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from strop.types import UserError

_STATE = "run.json"
_KINDS = (".safetensors", ".json", ".jsonl")  # of files that are read where they are there


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay when one more is there: the `newest` ones, those of every `every_steps`-th step, that of the
    step `best`. `drops_later`: the run went back, and those of later steps belong to what it left."""

    newest: int
    every_steps: int = 0
    best: int | None = None
    drops_later: bool = False


def write_checkpoint(
    folder: Path, step: int, *, save: Callable[[Path], None], state: dict[str, Any], keep: Keep
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
    _remove(old)
    _prune(folder, step, keep)
    return target


def _prune(folder: Path, step: int, keep: Keep) -> None:
    """Of the checkpoints up to `step` those that are to be kept and are whole stay. A later one is damaged, or the run would
    have gone on from it; it is replaced when its step is made again."""
    until = [path for path in _numbered(folder) if _step_of(path) <= step or keep.drops_later]
    whole = [path for path in until if _step_of(path) <= step and not any(_faults(path, reads_files=False))]
    kept = set(whole[-keep.newest :])
    kept |= {path for path in whole if keep.every_steps and _step_of(path) % keep.every_steps == 0}
    kept |= {path for path in whole if _step_of(path) == keep.best}
    for path in set(until) - kept:
        _remove(path)


def has_checkpoints(folder: Path) -> bool:
    """Whole or damaged."""
    return bool(_numbered(folder)) or any(folder.glob(".step_*.old"))


def find_checkpoint(folder: Path, which: str, *, warn: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """The checkpoint that --resume asks for, and its state: the "newest" that is whole, the "best", or one by its name.

    Raises:
        UserError: it is not there, or damaged.
    """
    path, state = newest_checkpoint(folder, warn=warn)
    if which == "newest":
        return path, state
    names = ", ".join(path.name for path in _numbered(folder))
    if which == "best":
        if state.get("best_step") is None:
            raise UserError(
                f"--resume best needs the checkpoint of the best evaluation, and {folder} knows of none. There are {names}."
            )
        which = f"step_{state['best_step']:06d}"
    target = folder / which
    fault = next(_faults(target, reads_files=True), None) if target.exists() else "there is no such checkpoint"
    if fault is not None:
        kept = "run.keep_best_checkpoint keeps that of the best evaluation, run.keep_every_steps some for good."
        raise UserError(f"{target} cannot be resumed from: {fault}. There are {names}. {kept}")
    return target, json.loads((target / _STATE).read_text())


def newest_checkpoint(folder: Path, *, warn: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint that is whole, and its state; a damaged one is passed over with a warning.

    Raises:
        UserError: there is none.
    """
    _finish_renaming(folder)
    found = checkpoint_until(folder, warn=warn)
    if found is None:
        raise UserError(f"{folder}: there is no complete checkpoint to resume from.")
    return found


def _finish_renaming(folder: Path) -> None:
    for old in folder.glob(".step_*.old"):  # stopped between the two renames
        target = folder / old.name[1:].removesuffix(".old")
        _remove(old) if target.exists() else old.rename(target)


def _remove(path: Path) -> None:
    """A folder, or what stands in the place of one. What cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def checkpoint_until(
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
    return sorted((path for path in folder.glob("step_*") if path.name[5:].isdecimal()), key=_step_of)


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
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
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
        elif reads_files:
            yield from _differences(file, seen)
    for name in sorted(file.name for file in path.iterdir() if file.suffix in _KINDS):
        if name not in files and name != _STATE:
            yield f"{name} was not written with it"


def _digest(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _differences(file: Path, seen: dict[str, Any]) -> Iterator[str]:
    try:
        if _seen(file) != seen:
            yield f"{file.name} is not what was written: its checksum differs"
    except OSError as error:
        yield f"{file.name} cannot be read ({error.strerror})"


def _seen(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
