"""What else is wrong with a config whose values are not all valid: the rest of it is looked at without them."""

from __future__ import annotations

import copy
import re
from typing import Any, TypeVar

from pydantic import ValidationError

from strop.config.base import Options
from strop.config.messages import path_of

Root = TypeVar("Root", bound=Options)


def without_problems(root: type[Root], values: dict[str, Any], error: ValidationError) -> tuple[Root | None, list[str]]:
    """The config without the values that an error names, and the paths that were taken out; None where what is left is no
    config, as without an option that must be given."""
    left, taken_out = copy.deepcopy(values), []
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        path = path_of(root, problem["loc"])
        taken_out.append(path)
        _take_out(left, path.split("."))
    try:
        return root.model_validate(left), taken_out
    except ValidationError:
        return None, taken_out


def _take_out(values: Any, parts: list[str]) -> None:
    for part in parts[:-1]:
        if not isinstance(values, dict):
            return
        values = values.get(part)
    if isinstance(values, dict):
        values.pop(parts[-1], None)


def speaks_of(sentence: str, paths: list[str]) -> bool:
    """Does a rule name an option that was taken out? Then its value here is not the user's."""
    names = {path for path in paths} | {path.rpartition(".")[2] for path in paths}
    return any(re.search(rf"(?<![\w]){re.escape(name)}(?![\w])", sentence) for name in names)
