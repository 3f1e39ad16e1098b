"""The small model and its data, built once."""

import pytest
from commands.small_runs import write_small


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    return write_small(tmp_path_factory.mktemp("small"))
