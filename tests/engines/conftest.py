"""Fixtures of the engines whose samples come from elsewhere."""

import pytest
import tiny_models


@pytest.fixture
def model():
    """Of the trainer; servers began with the same."""
    return tiny_models.llama()


@pytest.fixture
def server(servers):
    """The first of a file's two stand-ins, as one that was just started."""
    for stand_in, _ in servers:
        stand_in.begin()
    return servers[0][0]
