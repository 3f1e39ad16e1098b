"""A worker process as the run sees it: started, spoken to, stopped."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from typing import Any

from strop.rewards.tied import TiedProcess
from strop.rewards.user_function import FunctionSpec
from strop.rewards.worker import LENGTH_BYTES, packed

MAX_SEND_S = 60.0  # for a worker to take a task in
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); pipes = map(int, sys.argv[2:4]); del sys.argv[1:]; "
    "from strop.rewards.worker import main; main(*pipes)"
)


class WorkerProcess:
    """A fresh Python in a session of its own, so that Ctrl-C on the terminal does not reach it: the run decides. It ends
    when the run does, and when nobody holds this object any more.

    Args:
        spec: the function that it loads.
    """

    def __init__(self, spec: FunctionSpec) -> None:
        given, self._tasks = os.pipe()
        self._results, gives = os.pipe()
        program = [sys.executable, "-P", "-u", "-c", _PROGRAM, json.dumps(sys.path), str(given), str(gives)]
        self._process = TiedProcess(
            program,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(given, gives),
            env={"PYTHONHASHSEED": "0", **os.environ},  # hash() is the same in every worker and every run
        )
        os.close(given)
        os.close(gives)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._printed = {self._process.stdout.fileno(): "stdout", self._process.stderr.fileno(): "stderr"}
        for pipe in (self._tasks, *self.pipes):
            os.set_blocking(pipe, False)
        self._read, self.is_closed = bytearray(), False
        self._end = weakref.finalize(self, _end, self._process, (self._tasks, self._results))
        self.send(spec)

    @property
    def pipes(self) -> tuple[int, ...]:
        """What there may be something to read from."""
        return (self._results, *self._printed)

    @property
    def has_ended(self) -> bool:
        return self._exit_code() is not None

    def _exit_code(self) -> int | None:
        """Where the system can, without letting go of its number: what it started may still have to be ended by it."""
        if self._process.returncode is not None or not hasattr(os, "waitid"):
            return self._process.poll()
        found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def _wait(self, limit_s: float) -> int | None:
        until = time.monotonic() + limit_s
        while self._exit_code() is None and time.monotonic() < until:
            time.sleep(0.005)
        return self._exit_code()

    def send(self, message: Any) -> bool:
        """False where the worker does not take it: it has ended, or is stuck."""
        waiting, until = memoryview(packed(message)), time.monotonic() + MAX_SEND_S
        while waiting:
            try:
                waiting = waiting[os.write(self._tasks, waiting) :]
            except BlockingIOError:
                if self.has_ended or time.monotonic() > until:
                    return False
                select.select([], [self._tasks], [], 0.2)
            except BrokenPipeError:
                return False
        return True

    def messages(self) -> Iterator[tuple[Any, ...]]:
        """What has come since the last time. `is_closed` afterwards: nothing more will."""
        for part in self._parts(self._results):
            self._read += part
        while len(self._read) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._read[:LENGTH_BYTES], "big")
            if len(self._read) < end:
                return
            body = bytes(self._read[LENGTH_BYTES:end])
            del self._read[:end]
            yield pickle.loads(body)

    def pass_on_prints(self) -> None:
        """To where this process prints."""
        for pipe, name in self._printed.items():
            text = b"".join(self._parts(pipe)).decode("utf-8", "replace")
            if text:
                stream = getattr(sys, name)
                stream.write(text)
                stream.flush()

    def _parts(self, pipe: int) -> Iterator[bytes]:
        while True:
            try:
                part = os.read(pipe, 1 << 20)
            except BlockingIOError:
                return
            if not part:
                self.is_closed = self.is_closed or pipe == self._results
                return
            yield part

    def ending(self) -> str:
        """How it ended, in words."""
        code = self._wait(1)
        if code is None:
            return "closed its pipe to the run"
        if code >= 0:
            return f"ended its process with exit code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
        why = ", by itself or by a system that is short of memory" if -code == signal.SIGKILL else ""
        return f"lost its process to signal {-code} ({name}{why})"

    def stop(self, *, grace_s: float = 0.0) -> None:
        """End it and all that it started. With a grace it is interrupted first, and may clean up for so long."""
        if grace_s and not self.has_ended:
            os.kill(self._process.pid, signal.SIGINT)
            self._wait(grace_s)
        with contextlib.suppress(OSError, ValueError):
            self.pass_on_prints()
        self._end()


def _end(process: TiedProcess, pipes: tuple[int, ...]) -> None:
    process.end()
    for pipe in pipes:
        os.close(pipe)
