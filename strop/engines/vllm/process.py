"""vLLM servers that strop starts on this machine, each a process of another Python environment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from strop.engines.served import process
from strop.engines.served.process import Program, Served
from strop.engines.vllm.remote import strop_weights

REMOTE = Path(strop_weights.__file__).parent
DEFAULTS = {  # variables where they are not set already, of where vLLM runs on the CPU
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
_PROGRAM = Program(
    name="vLLM",
    module="strop_vllm",
    how_to_install="make vllm-env makes one in .venv-vllm",
    defaults=DEFAULTS,
    environment={"PYTHONPATH": str(REMOTE), "VLLM_SERVER_DEV_MODE": "1"},
)


def server_command(served: Served, *, backend: str) -> list[str]:
    """Arguments of a server that strop can use: those of vllm serve, without address and port."""
    given = [*engine_args(served), "--enable-scale-out", "--disable-uvicorn-access-log"]
    given += ["--weight-transfer-config", json.dumps({"backend": backend})]
    return [*given, "--worker-extension-cls", "strop_vllm.Extension"]


def engine_args(served: Served) -> list[str]:
    """What vLLM is told of a model, wherever it runs."""
    given = ["--model", served.path, "--dtype", served.dtype, "--generation-config", "vllm"]
    given += ["--logprobs-mode", "processed_logprobs"]
    # On a CPU vLLM fails where it reads a prompt of a sample that has a seed in parts: its generators do not go back there.
    given += ["--enforce-eager", "--no-enable-chunked-prefill"] if served.on_cpu else []
    return given + (["--trust-remote-code"] if served.trust_remote_code else [])


class ServerProcess(process.ServerProcess):
    """A vLLM server that ends with this process, however that ends; see `process.ServerProcess`."""

    def __init__(self, python: str, args: Sequence[str], log: Path, *, host: str = "127.0.0.1") -> None:
        super().__init__(_PROGRAM, python, args, log, host=host)
