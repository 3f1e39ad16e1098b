"""Processes forked from one that has imported everything: a command of strop starts in them in a tenth of a second."""

import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing import forkserver
from unittest.mock import patch

MOST_S = 300.0  # what is waited for comes long before, on whatever machine


PRELOADED = [
    "rank_processes",
    "tiny_models",
    "strop.cli",
    "strop.runtime.sft",
    "strop.runtime.train",
    "torch.distributed.fsdp",
    "strop.trainers.together",
    "strop.trainers.tensor_parallel",
    "strop.trainers.context_parallel",
]


def context():
    """Of the process that has imported them, which is started where there is none yet."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    # Python 3.11 hands it no path of this process, and says nothing of what it then does not find.
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        forkserver.ensure_running()
    return found


class Forked:
    """A multiprocessing process as a subprocess.Popen."""

    def __init__(self, process):
        self._process, self.pid = process, process.pid

    def poll(self):
        return self._process.exitcode

    def kill(self):
        self._process.kill()

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a process", timeout)
        return self._process.exitcode


def running(*arguments, **variables):
    """A command of strop, in a process with these variables."""
    process = context().Process(target=_run, args=(variables, [str(a) for a in arguments]), daemon=True)
    process.start()
    return Forked(process)


def _run(variables, arguments, written=(), prepare=None):
    from strop.cli import main

    os.environ.update(variables)
    if prepare is not None:
        prepare()
    for number, path in enumerate(written, 1):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, number)
        os.close(handle)
    sys.argv = ["strop", *arguments]
    main()


class Command:
    """A command of strop that runs beside a test; killed at the end of a `with` block, if it has not ended.

    Args:
        folder: for two files with what it prints.
        prepare: called in it before the command.
    """

    def __init__(self, folder, *arguments, prepare=None):
        self._out, self._err = folder / "command.out", folder / "command.err"
        self._out.write_text("")
        self._err.write_text("")
        words, written = [str(a) for a in arguments], [str(self._out), str(self._err)]
        self._process = context().Process(target=_run, args=({"COLUMNS": "300"}, words, written, prepare), daemon=True)
        self._process.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._process.kill()
        self._process.join()

    @property
    def out(self):
        return self._out.read_text(encoding="utf-8")

    @property
    def err(self):
        return self._err.read_text(encoding="utf-8")

    def until(self, beginning):
        """Wait until it has printed a line that begins so."""
        until, goes_on = time.monotonic() + MOST_S, True
        while not any(line.startswith(beginning) for line in self.out.rpartition("\n")[0].splitlines()):
            assert goes_on, (self.out, self.err)
            assert time.monotonic() < until, (self.out, self.err)
            goes_on = self._process.is_alive()
            time.sleep(0.005)

    def send_signal(self, number):
        os.kill(self._process.pid, number)

    def kill(self):
        """At once, and wait for its end."""
        self._process.kill()
        return self.wait()

    def wait(self):
        """Its exit code."""
        self._process.join(MOST_S)
        assert self._process.exitcode is not None, (self.out, self.err)
        return self._process.exitcode
