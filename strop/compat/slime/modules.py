"""The modules of slime that its users' functions import, where slime itself is not installed."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from strop.compat.slime.filters import DynamicFilterOutput
from strop.compat.slime.sample import Sample

_CONTENTS: dict[str, dict[str, Any]] = {
    "slime.utils.types": {"Sample": Sample},
    "slime.rollout.filter_hub.base_types": {"DynamicFilterOutput": DynamicFilterOutput},
}


def provide_slime_types() -> None:
    """Where slime is not installed, let `from slime.utils.types import Sample` give strop's, now and in a function's body,
    and likewise slime's DynamicFilterOutput."""
    if importlib.util.find_spec("slime") is not None:
        return
    for name, contents in _CONTENTS.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            _provide(".".join(parts[:depth]), is_package=depth < len(parts))
        vars(sys.modules[name]).update(contents)


def _provide(name: str, *, is_package: bool) -> None:
    if name in sys.modules:
        return
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=is_package)
    if is_package:
        module.__path__ = []  # so that what else slime has is said to be missing, by its name
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        vars(sys.modules[parent])[last] = module
