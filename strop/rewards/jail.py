"""Runs programs that a model wrote, each with limits, and apart from the rest as far as the system allows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from strop.rewards.tied import TiedProcess
from strop.types import RewardError

Ended = Literal["", "timeout", "memory", "processes", "crash", "wrong"]
MAX_START_S = 60.0
_GRACE_S = 30.0  # beyond a program's time: for a machine that is busy
_MEGABYTE = 1 << 20
_WORDS = {
    "network": "have no network",
    "processes": "see no other processes",
    "files": "write no files but in a folder of their own",
    "user": "run as a user of their own",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one run of a program: seconds, megabytes of each process, processes and threads, megabytes of files."""

    timeout_s: float
    memory_limit_mb: int
    max_processes: int
    file_limit_mb: int


@dataclass(frozen=True, slots=True)
class Ran:
    """How a run ended: "" where all was well; "wrong": an assert of the test failed. `out`: what it printed."""

    ended: Ended
    out: str


class Jail:
    """A process that runs programs, one after the other; started again when it is gone. For one thread.

    Attributes:
        kept: what programs are kept from: "network", "processes", "files", or "user", where the system allows it.

    Raises:
        RewardError: it does not start.
    """

    def __init__(self) -> None:
        self._start()

    def run(
        self, program: str, limits: Limits, *, stdin: str = "", test: str | None = None, max_output: int = 0
    ) -> Ran:
        """Run a program of Python's.

        Args:
            program: its text.
            limits: what it may take.
            stdin: what it reads from standard input.
            test: code that is run after the program, with what that defined.
            max_output: bytes of its output that are of interest.

        Raises:
            RewardError: it cannot be run, whatever it is.
        """
        request: dict[str, Any] = {"program": program, "stdin": stdin, "test": test, "max_output_bytes": max_output}
        request |= {"timeout_s": limits.timeout_s, "max_processes": limits.max_processes, "python": sys.executable}
        request["memory_limit_bytes"] = limits.memory_limit_mb * _MEGABYTE
        request["file_limit_bytes"] = limits.file_limit_mb * _MEGABYTE
        try:
            line = self._process.ask(json.dumps(request), limits.timeout_s + _GRACE_S)
        except KeyboardInterrupt:
            self.close()
            raise
        if not line:  # nothing that a program does should end it
            self.close()
            self._start()
            return Ran("crash", "")
        answer = json.loads(line)
        if answer["ended"] == "failed":
            raise RewardError(f"reward.kind = code could not run a program: {answer['text']}")
        return Ran(answer["ended"], answer["out"])

    def close(self) -> None:
        """End the process."""
        self._end()

    def _start(self) -> None:
        server = str(Path(__file__).with_name("jail_server.py"))
        pipe = subprocess.PIPE
        command = [sys.executable, "-I", "-S", server, sys.executable]
        # Answers with a surrogate, or other text that is not Unicode, go through as JSON writes them: in ASCII.
        self._process = TiedProcess(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=dict(os.environ))
        self._end = weakref.finalize(self, TiedProcess.end, self._process)
        line = self._process.ask("", MAX_START_S)
        if not line:
            self.close()
            raise RewardError("reward.kind = code needs a process that runs programs, and it did not start.")
        self.kept: tuple[str, ...] = tuple(json.loads(line))


def describe(kept: tuple[str, ...]) -> str:
    """What programs are kept from, in words."""
    if not kept:
        return "limits alone: this system keeps programs from no network, process or file"
    found = "limits, and programs " + ", ".join(_WORDS[word] for word in kept)
    return found if "network" in kept else f"{found}; they have the network"
