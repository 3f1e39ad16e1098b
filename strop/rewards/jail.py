"""Runs programs that a model wrote, each with limits, and apart from the rest as far as the system allows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from strop.rewards.tied import TiedProcess
from strop.types import RewardError

Isolation = Literal["full", "limits"]
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
_REFUSED = (
    "reward.isolation must be limits for reward.kind = code here, got full: this system lets strop keep the programs of a "
    "model from your files and processes by nothing (Linux: allow user namespaces, or run as root). With "
    "reward.isolation = limits such a program can delete your files and end your processes, this run among them: use it only "
    "in a container of its own."
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one run of a program: seconds, megabytes of each process, processes and threads, megabytes of files."""

    timeout_s: float
    memory_limit_mb: int
    max_processes: int
    file_limit_mb: int


@dataclass(frozen=True, slots=True)
class Ran:
    """How a run ended: "" where all was well; "wrong": an assert of the test failed. `out`: what it printed; `err`: the end of
    what it wrote on standard error."""

    ended: Ended
    out: str
    err: str = ""


class Jail:
    """A process that runs programs, one after the other; started again when it is gone. For one thread.

    Args:
        isolation: "full": programs can reach none of the other processes and files, or there is no jail; "limits": they
            have limits, and no network where the system allows it.

    Attributes:
        kept: what programs are kept from: "network", "processes" and "files", or "user": by being another one.

    Raises:
        RewardError: it does not start, or the system does not allow the isolation.
    """

    def __init__(self, isolation: Isolation = "full") -> None:
        self._isolation: Isolation = isolation
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
        line = self._ask(request, limits) or self._ask(request, limits)  # what ended it need not have been the program
        if not line:
            return Ran("crash", "")
        answer = json.loads(line)
        if answer["ended"] == "failed":
            raise RewardError(f"reward.kind = code could not run a program: {answer['text']}")
        return Ran(answer["ended"], answer["out"], answer["text"])

    def check(self, limits: Limits) -> None:
        """See that Python starts within limits.

        Raises:
            RewardError: it does not.
        """
        ran = self.run("", replace(limits, timeout_s=MAX_START_S), test="pass")
        if ran.ended:
            why = ran.err.strip().splitlines()[-1:] or [ran.ended]
            raise RewardError(
                "reward.kind = code must be able to run a program that does nothing, and this did not end well with "
                f"reward.memory_limit_mb = {limits.memory_limit_mb} and {sys.executable}, {describe(self.kept)}: {why[0]}"
            )

    def close(self) -> None:
        """End the process."""
        self._end()

    def _ask(self, request: dict[str, Any], limits: Limits) -> bytes:
        """Its answer; empty where it has ended, and another one is there now."""
        try:
            line = self._process.ask(json.dumps(request), limits.timeout_s + _GRACE_S)
        except KeyboardInterrupt:
            self.close()
            raise
        if not line:
            self.close()
            self._start()
        return line

    def _start(self) -> None:
        server = str(Path(__file__).with_name("jail_server.py"))
        pipe = subprocess.PIPE
        command = [sys.executable, "-I", "-S", server, sys.executable, self._isolation]
        # Answers with a surrogate, or other text that is not Unicode, go through as JSON writes them: in ASCII.
        self._process = TiedProcess(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=dict(os.environ))
        self._end = weakref.finalize(self, TiedProcess.end, self._process)
        line = self._process.ask("", MAX_START_S)
        if not line:
            self.close()
            raise RewardError("reward.kind = code needs a process that runs programs, and it did not start.")
        self.kept: tuple[str, ...] = tuple(json.loads(line))
        if self._isolation == "full" and not self.kept:
            self.close()
            raise RewardError(_REFUSED)


def describe(kept: tuple[str, ...]) -> str:
    """What programs are kept from, in words."""
    found = "limits, and programs " + ", ".join(_WORDS[word] for word in kept) if kept else "limits alone"
    can = [] if "network" in kept else ["have the network"]
    if not {"processes", "user"} & set(kept):
        can.append("can change your files and end your processes")
    return f"{found}; they {' and '.join(can)}" if can else found
