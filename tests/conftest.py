"""Tests say how many GPUs they need: `@pytest.mark.gpus(1)`. None by default; too few here means skipped, with the reason.
Files that say that they are `long` come first, so that of several processes none is left alone with one at the end."""

from __future__ import annotations

import signal

import pytest


def pytest_configure() -> None:
    """Ctrl-C reaches the commands that tests start also where the suite itself runs in the background, which ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpus", type=int, default=None, help="run only the tests that need exactly so many GPUs")
    parser.addoption("--vllm", default=None, help="Python of an environment with vLLM: run the tests against it")
    parser.addoption("--ray", action="store_true", help="run the tests that start a Ray cluster")
    parser.addoption("--megatron", action="store_true", help="run the tests with Megatron-Core, on the CPU")
    parser.addoption("--vllm-model", default=None, help="model folder for these; a small one is made without it")


def gpus_needed(item: pytest.Item) -> int:
    marker = item.get_closest_marker("gpus")
    return int(marker.args[0]) if marker else 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    wanted = config.getoption("--gpus")
    if wanted is not None:
        unwanted = [item for item in items if gpus_needed(item) != wanted]
        items[:] = [item for item in items if gpus_needed(item) == wanted]
        config.hook.pytest_deselected(items=unwanted)
    needing = [item for item in items if gpus_needed(item)]
    if not needing or config.option.collectonly:
        return
    import torch

    for item in needing:
        if gpus_needed(item) > torch.cuda.device_count():
            reason = f"needs {gpus_needed(item)} GPUs, this machine has {torch.cuda.device_count()}"
            item.add_marker(pytest.mark.skip(reason=reason))
