"""Every config among the examples loads, and what it names is there."""

from pathlib import Path

import pytest

from strop.config import load_config
from strop.config.tree import walk

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "examples").rglob("*.toml"))


def loaded(path):
    return load_config(path, command="sft" if "sft" in path.stem else "train")


def test_there_are_examples():
    assert len(CONFIGS) >= 3


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_config_loads_without_a_warning(path):
    warnings = [warning for _, table in walk(loaded(path)) for warning in table.warnings()]
    assert warnings == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_of_the_repository_that_the_config_names_are_there(path):
    config = loaded(path)
    names = [getattr(config.data, "path", ""), getattr(getattr(config, "reward", None), "function", "")]
    held_out = getattr(getattr(config, "eval", None), "data", None)
    names = [name.rpartition(":")[0] or name for name in [*names, getattr(held_out, "path", "")]]
    assert [name for name in names if name.startswith("examples/") and not (ROOT / name).exists()] == []
