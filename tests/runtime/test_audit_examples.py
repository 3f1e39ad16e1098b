"""strop audit of the examples: none of their options is dead."""

from pathlib import Path

import pytest
from rank_processes import forked_ranks  # noqa: F401 - a fixture of this file
from runtime.audited import failures

from strop.config import load_config
from strop.runtime.audit import audit

pytestmark = pytest.mark.long
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("example", sorted(EXAMPLES.rglob("*.toml")), ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_no_option_of_an_example_is_dead(example):
    command = "sft" if example.name == "sft.toml" else "train"
    assert failures(audit(load_config(example, command=command))) == []


def test_there_are_examples_of_both_commands():
    assert {"cispo.toml", "ppo.toml", "distill.toml", "sft.toml", "config.toml"} <= {
        p.name for p in EXAMPLES.rglob("*.toml")
    }
