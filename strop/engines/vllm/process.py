"""vLLM servers that strop starts on this machine, each a process of another Python environment."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from strop.engines.vllm.remote import strop_weights
from strop.types import UserError

REMOTE = Path(strop_weights.__file__).parent
END_S = 10.0  # for a process that was asked to end
_TAIL_LINES, _TAIL_BYTES = 12, 20_000
# Where vLLM runs on the CPU; a variable that is set already stays.
_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
_OF_OURS = {"PYTHONPATH": str(REMOTE), "VLLM_SERVER_DEV_MODE": "1", "STROP_VLLM_ENDS_WITH_STDIN": "1"}


@dataclass(frozen=True)
class Served:
    """The model that servers begin with."""

    path: str
    dtype: str
    on_cpu: bool
    trust_remote_code: bool = False


def server_command(served: Served, *, backend: str) -> list[str]:
    """Arguments of a server that strop can use: those of vllm serve, without address and port."""
    given = ["--model", served.path, "--dtype", served.dtype, "--generation-config", "vllm", "--enable-scale-out"]
    given += ["--logprobs-mode", "processed_logprobs", "--weight-transfer-config", json.dumps({"backend": backend})]
    given += ["--worker-extension-cls", "strop_vllm.Extension", "--disable-uvicorn-access-log"]
    given += ["--enforce-eager"] if served.on_cpu else []
    return given + (["--trust-remote-code"] if served.trust_remote_code else [])


class EndedError(UserError):
    """A server's process has ended by itself.

    Args:
        what: which, and how.
        lines: the last that it printed.
    """

    def __init__(self, what: str, lines: str) -> None:
        super().__init__(what, lines)
        self.what = what

    def __str__(self) -> str:
        return ". ".join(map(str, self.args))


class ServerProcess:
    """A server that ends with this process, however that ends.

    Args:
        python: executable of the environment that has vLLM.
        args: of `server_command` and of the user.
        log: file for what it prints.
        host: the address of this machine at which it listens.
    """

    def __init__(self, python: str, args: Sequence[str], log: Path, *, host: str = "127.0.0.1") -> None:
        self.log, self._python, self._args, self._host = log, python, list(args), host
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port(host)

    @property
    def address(self) -> str:
        return f"http://{self._host}:{self.port}"

    def start(self) -> None:
        """Start it. One that runs still is ended first.

        Raises:
            UserError: there is no such executable.
        """
        self.stop()
        python = shutil.which(self._python)
        if python is None:
            raise UserError(
                f"engine.python must be the Python executable of an environment with vLLM, got {self._python!r}: there is "
                "none. make vllm-env makes one in .venv-vllm; for a server that runs already set engine.addresses."
            )
        environment = {**_ENVIRONMENT, **os.environ, **_OF_OURS}
        command = [python, str(REMOTE / "strop_vllm.py"), *self._args, "--host", self._host, "--port", str(self.port)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def check(self) -> None:
        """Raises EndedError once it has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            raise EndedError(
                f"the vLLM server of {self._python} ended with code {self._process.returncode}",
                f"Its last lines, of {self.log}:\n{self.last_lines()}",
            )

    def last_lines(self) -> str:
        """The end of what it printed."""
        text = self.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace") if self.log.exists() else ""
        return "\n".join(line[:300] for line in text.splitlines()[-_TAIL_LINES:])

    def stop(self) -> None:
        """End it and all that it started: asked first, then made to."""
        process, self._process = self._process, None
        if process is None:
            return
        _signal(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        _signal(process.pid, signal.SIGKILL)
        process.wait(END_S)
        if process.stdin is not None:
            process.stdin.close()


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError):  # all of it has ended
        os.killpg(group, number)


def _free_port(host: str) -> int:
    with socket.socket() as found:
        found.bind((host, 0))
        return found.getsockname()[1]
