"""strop audit of the examples: none of their options is dead."""

from pathlib import Path

import pytest
from runtime.audited import failures

from strop.config import load_config
from strop.runtime.audit import audit

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("example", ["quickstart/cispo.toml", "quickstart/distill.toml", "smollm2-sums/config.toml"])
def test_no_option_of_an_example_is_dead(example):
    assert failures(audit(load_config(ROOT / "examples" / example))) == []
