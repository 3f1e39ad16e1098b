"""Servers that strop starts on this machine, each a process of another Python environment."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from strop.engines.served.remote import ends_with_stdin
from strop.types import UserError

END_S = 10.0  # for a process that was asked to end
_TAIL_LINES, _TAIL_BYTES = 12, 20_000


@dataclass(frozen=True)
class Served:
    """The model that servers begin with."""

    path: str
    dtype: str
    on_cpu: bool
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Program:
    """What a server of one kind is, to whoever starts it."""

    name: str  # whose it is
    module: str  # run with Python, and the arguments after it
    how_to_install: str  # a clause
    defaults: Mapping[str, str] = field(
        default_factory=dict
    )  # variables of the environment where they are not set already
    environment: Mapping[str, str] = field(default_factory=dict)  # and those that must be so


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
        program: what it is.
        python: executable of the environment that has it.
        args: of the server, without address and port.
        log: file for what it prints.
        host: the address of this machine at which it listens.
    """

    def __init__(
        self, program: Program, python: str, args: Sequence[str], log: Path, *, host: str = "127.0.0.1"
    ) -> None:
        self.log, self._program, self._python, self._args, self._host = log, program, python, list(args), host
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port(host)

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
                f"engine.python must be the Python executable of an environment with {self._program.name}, got "
                f"{self._python!r}: there is none. {self._program.how_to_install}; for a server that runs already set "
                "engine.addresses."
            )
        environment = {**self._program.defaults, **os.environ, **self._program.environment}
        command = [python, ends_with_stdin.__file__, self._program.module, *self._args]
        command += ["--host", self._host, "--port", str(self.port)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def check(self) -> None:
        """Raises EndedError once it has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            raise EndedError(
                f"the {self._program.name} server of {self._python} ended with code {self._process.returncode}",
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


def free_port(host: str) -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as found:
        found.bind((host, 0))
        return found.getsockname()[1]
