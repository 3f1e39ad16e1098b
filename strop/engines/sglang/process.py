"""SGLang servers that strop starts on this machine, each a process of another Python environment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from strop.config import SGLangEngineOptions
from strop.engines.served import process
from strop.engines.served.process import Program, Served

_PROGRAM = Program(
    name="SGLang",
    module="sglang.launch_server",
    how_to_install="python -m venv .venv-sglang && .venv-sglang/bin/pip install sglang==0.5.23 makes one",
)
_DETERMINISTIC, _SLEEP = "--enable-deterministic-inference", ("--enable-memory-saver", "--enable-weights-cpu-backup")


def flags_of(options: SGLangEngineOptions) -> dict[str, bool]:
    """With which a server must have been started (True) or must not (False), whoever starts it."""
    return {_DETERMINISTIC: options.deterministic, **({flag: True for flag in _SLEEP} if options.sleep else {})}


def server_command(served: Served, options: SGLangEngineOptions) -> list[str]:
    """Arguments of a server that strop can use: those of SGLang's launch_server, without address and port."""
    given = ["--model-path", served.path, "--dtype", served.dtype, "--sampling-defaults", "openai"]
    given += [
        "--skip-tokenizer-init",
        "--log-level-http",
        "warning",
        *(flag for flag, wanted in flags_of(options).items() if wanted),
    ]
    given += ["--trust-remote-code"] if served.trust_remote_code else []
    return [*given, *options.server_args]


class ServerProcess(process.ServerProcess):
    """An SGLang server that ends with this process, however that ends; see `process.ServerProcess`."""

    def __init__(self, python: str, args: Sequence[str], log: Path, *, host: str = "127.0.0.1") -> None:
        super().__init__(_PROGRAM, python, args, log, host=host)
