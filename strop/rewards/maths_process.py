"""Runs math-verify in a process of its own, which can be stopped: some answers would keep sympy busy for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

from strop.rewards.tied import TiedProcess
from strop.types import RewardError

MAX_WAIT_S = 30.0  # of wall clock; the server's own limit, in processor time, comes long before
MAX_START_S = 300.0


class MathsProcess:
    """A running `maths_server.py`, started again when it is gone. Safe to use from any thread.

    Raises:
        RewardError: the server does not start.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start()

    def is_equal(self, label: str, answer: str, *, is_marked: bool) -> bool | None:
        """Whether an answer equals the label; None if that took too long to tell.

        Args:
            label: the right answer, as LaTeX or plain text.
            answer: the answer, or with is_marked = False the text in which to find it.
            is_marked: the whole of `answer` is the answer.
        """
        with self._lock:
            if self._process.poll() is not None:
                self._stop()
                self._start()
            try:
                line = self._process.ask(json.dumps([label, answer, is_marked]), MAX_WAIT_S)
            except KeyboardInterrupt:
                self._stop()  # its answer would be taken for the next question's
                raise
            if line:
                return json.loads(line)
            self._stop()
            self._start()
            return None

    def _start(self) -> None:
        self._process = _start()
        self._stop = weakref.finalize(self, TiedProcess.end, self._process)


def _start() -> TiedProcess:
    # -P: what lies beside the server, or in the working directory, does not stand before installed packages.
    command = [sys.executable, "-P", str(Path(__file__).with_name("maths_server.py"))]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    env = {**os.environ, "PYTHONHASHSEED": "0"}  # the same verdict in every run
    process = TiedProcess(command, stdin=pipe, stdout=pipe, stderr=nowhere, env=env)
    if json.loads(process.ask(json.dumps(["1", "1", True]), MAX_START_S) or "null") is not True:
        process.end()
        raise RewardError(
            "reward.kind = math needs a working math-verify, but its process did not answer. "
            f'Run it to see why: {" ".join(command)} <<< \'["1", "1", true]\''
        )
    return process
