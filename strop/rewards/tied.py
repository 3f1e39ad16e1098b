"""Processes that never outlive the one that started them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_STARTER = str(Path(__file__).with_name("tied_start.py"))


class TiedProcess(subprocess.Popen[bytes]):
    """A program in a session of its own, which ends with this process, whatever ends that: the program, and all that it
    starts and that stays in its process group.

    Args:
        command: the program's path and its arguments.
        pass_fds: that it holds beside its standard streams.
        options: of subprocess.Popen.
    """

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int] = (), **options: Any) -> None:
        watched, self._life = os.pipe()
        starter = [sys.executable, "-I", "-S", _STARTER, str(watched)]
        try:
            super().__init__([*starter, *command], pass_fds=(watched, *pass_fds), start_new_session=True, **options)
        except BaseException:
            os.close(self._life)
            raise
        finally:
            os.close(watched)

    def ask(self, question: str, limit_s: float) -> bytes:
        """Its answer, a line, to a question, a line; empty where it has ended, or is ended because it took too long."""
        assert self.stdin is not None
        assert self.stdout is not None
        timer = threading.Timer(limit_s, self.kill_group)
        timer.start()
        try:
            self.stdin.write(question.encode() + b"\n")
            self.stdin.flush()
            return self.stdout.readline()
        except BrokenPipeError:
            return b""
        finally:
            timer.cancel()

    def kill_group(self) -> None:
        """End it and all that it has started."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """The same; wait for it, and close the pipes to it. To be called once."""
        self.kill_group()
        self.wait()
        os.close(self._life)  # its group ends now, if it ended before
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
