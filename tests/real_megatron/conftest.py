"""Tests with a real Megatron-Core, whose calls of CUDA a shim does on the CPU: make test-megatron."""

import os
from pathlib import Path
from unittest.mock import patch

import forked
import megatron_shim
import megatron_shimmed
import pytest

CHATTER = ("UserWarning", "DeprecationWarning", "FutureWarning")  # Megatron-Core's, of how it calls itself and torch


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.path.parent.name == "real_megatron":
            if not config.getoption("--megatron"):
                item.add_marker(pytest.mark.skip(reason="puts the CPU in CUDA's place: make test-megatron"))
            for kind in CHATTER:
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}"))


@pytest.fixture(autouse=True, scope="session")
def cpu_in_place_of_cuda():
    """Here, and in the process that ranks are forked from, which finds the modules of tests by its environment."""
    folders = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    with patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(filter(None, folders)), megatron_shimmed.ASKED: "1"}):
        forked.PRELOADED.append("megatron_shimmed")
        megatron_shim.install()
        yield
