"""Tests against a real vLLM, of an environment of its own: make vllm-env, then make test-vllm."""

import json
import time
import urllib.error
import urllib.request

import pytest
from real_model import LETTERS, REWARD, load, write_real_model

from strop.engines.vllm.process import Served, ServerProcess, server_command


def pytest_collection_modifyitems(config, items):
    if config.getoption("--vllm") is None:
        for item in items:
            if item.path.parent.name == "real_vllm":
                item.add_marker(pytest.mark.skip(reason="needs vLLM: make vllm-env, then make test-vllm"))


@pytest.fixture(scope="session")
def python(request):
    return request.config.getoption("--vllm")


@pytest.fixture(scope="session")
def folder(request, tmp_path_factory):
    """The model folder that was named, or a small one."""
    named = request.config.getoption("--vllm-model")
    return named or str(write_real_model(tmp_path_factory.mktemp("real") / "model"))


@pytest.fixture
def model(folder):
    return load(folder)


def is_up(address):
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=10):
            return True
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="session")
def address(folder, python, tmp_path_factory):
    """A server that is there already, as one started by hand is."""
    args = [*server_command(Served(folder, "float32", on_cpu=True), backend="strop_files"), "--max-model-len", "512"]
    process = ServerProcess(python, args, tmp_path_factory.mktemp("log") / "server.log")
    process.start()
    try:
        while not is_up(process.address):
            process.check()
            time.sleep(0.5)
        yield process.address
    finally:
        process.stop()


@pytest.fixture(scope="session")
def config(folder, tmp_path_factory):
    """A config of five steps without an engine; what follows its last line is [engine]."""
    here = tmp_path_factory.mktemp("train")
    rows = [{"prompt": LETTERS[place : place + 6], "label": "1"} for place in range(16)]
    (here / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (here / "reward.py").write_text(REWARD)
    (here / "train.toml").write_text(
        f'[model]\npath = "{folder}"\n[data]\nkind = "jsonl"\npath = "{here}/train.jsonl"\n'
        "[rollout]\nprompts_per_step = 2\ngroup_size = 4\nmax_response_tokens = 12\n"
        "[trainer]\nlr = 1e-4\nnum_threads = 1\n[run]\nnum_steps = 5\n"
    )
    return here / "train.toml"
