"""Loads a user's scoring function by where it is."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from strop.types import RewardError


def load_function(spec: str, *, option: str = "reward.function") -> Callable[[Any], Any]:
    """Load `module:function` or `path/to/file.py:function`.

    Modules are looked for in the working directory first; a file can import its neighbours, as with `python file.py`.

    Args:
        spec: where the function is.
        option: that says so, for messages.

    Returns:
        The function.

    Raises:
        RewardError: there is no such file, module or function, it is not callable, or its module fails.

    >>> load_function("math:sqrt")(4)
    2.0
    """
    source, colon, name = spec.rpartition(":")
    if not (colon and source and name):
        raise RewardError(
            f"{option} must be module:function or path/to/file.py:function, got {spec!r}. "
            "The part after the colon is the function's name."
        )
    module = _load_file(Path(source), spec, option) if source.endswith(".py") else _load_module(source, spec, option)
    if not hasattr(module, name):
        raise RewardError(f"{option} must name a function that exists, got {spec!r}: {source} has no {name!r}.")
    function = getattr(module, name)
    if not callable(function):
        raise RewardError(
            f"{option} must name a function, got {spec!r}: {name!r} there is of type {type(function).__name__}."
        )
    return function


def source_file(spec: str) -> Path | None:
    """The file that a function's module is read from; None where there is none."""
    source = spec.rpartition(":")[0]
    file = source if source.endswith(".py") else _module_file(source)
    return Path(file) if file and Path(file).is_file() else None


def is_only_here(spec: str) -> bool:
    """Can no other process load it? So it is with what was written in a notebook, or made while the program runs.

    >>> is_only_here("__main__:score"), is_only_here("json:loads")
    (True, False)
    """
    source = spec.rpartition(":")[0]
    if source == "__main__":
        return True
    module = None if source.endswith(".py") else sys.modules.get(source)
    return module is not None and module.__spec__ is None


def _module_file(source: str) -> str | None:
    """Of a module by its name, without importing it or its packages."""
    if source in sys.modules:
        return getattr(sys.modules[source], "__file__", None)
    found, places = None, [str(Path.cwd()), *sys.path]
    parts = source.split(".")
    for depth in range(1, len(parts) + 1):
        found = PathFinder.find_spec(".".join(parts[:depth]), places)
        if found is None:
            return None
        places = list(found.submodule_search_locations or ())
    return None if found is None else found.origin


def _load_module(source: str, spec: str, option: str) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name and (source == error.name or source.startswith(error.name + ".")):
            raise RewardError(
                f"{option} must name a module that exists, got {spec!r}: there is no module {error.name!r} in "
                f"{Path.cwd()} or among the installed packages."
            ) from error
        raise RewardError(f"{option} = {spec!r}: importing {source} failed, {error}") from error
    except (Exception, SystemExit) as error:
        raise RewardError(f"{option} = {spec!r}: importing {source} failed, {_why(error)}") from error


def _load_file(path: Path, spec: str, option: str) -> ModuleType:
    if not path.is_file():
        raise RewardError(
            f"{option} must name a file that exists, got {spec!r}: there is no file {path}. "
            f"Relative paths are taken from {Path.cwd()}."
        )
    name = f"strop_reward_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None, path
    assert found.loader is not None, path
    module = importlib.util.module_from_spec(found)
    _make_importable(path.resolve().parent)
    sys.modules[name] = module  # dataclasses and pickle look a module up by its name
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise RewardError(f"{option} = {spec!r}: {path} failed, {_why(error)}") from error
    return module


def _why(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it ended the process: {error!r}"
    return f"{type(error).__name__}: {error}"


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
