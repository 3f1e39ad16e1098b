"""Ranks for tests: real processes that do what strop.runtime.rank does, forked from one that has imported everything."""

import multiprocessing
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from strop.cli import main
from strop.config import TorchTrainerOptions
from strop.runtime import rank, ranks
from strop.trainers.ranks import everywhere

started = []  # by this process, the newest last
PRELOADED = [  # by the process that ranks are forked from
    "rank_processes",
    "tiny_models",
    "torch.distributed.fsdp",
    "strop.trainers.together",
    "strop.trainers.tensor_parallel",
    "strop.trainers.context_parallel",
]


def _serve(variables):
    os.environ.update(variables)
    sys.exit(rank.serve(timeout_s=float(variables[rank.TIMEOUT_S]), num_threads=int(variables[rank.NUM_THREADS])))


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
            raise subprocess.TimeoutExpired("a rank", timeout)
        return self._process.exitcode


def _context():
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload(PRELOADED)
    return context


def start(variables):
    process = _context().Process(target=_serve, args=(variables,), daemon=True)
    process.start()
    started.append(Forked(process))
    return started[-1]


@pytest.fixture(autouse=True, scope="module")
def forked_ranks():
    """For files that import it: ranks come from a process that has imported everything, which costs a tenth."""
    with patch.object(ranks, "start_process", start):
        yield


@contextmanager
def opened(num_processes, *, process_timeout_s=60.0, **more):
    """Ranks, this process being rank 0."""
    options = TorchTrainerOptions(num_processes=num_processes, process_timeout_s=process_timeout_s, **more)
    torch.set_num_threads(1)
    with patch.object(ranks, "start_process", start), ranks.open_ranks(options, device=torch.device("cpu")) as found:
        yield found


class Breaks:
    """A learner of which one rank fails on demand."""

    def __init__(self, model, *, by, ranks):
        self.model, self.by, self.ranks = model, by, ranks

    @everywhere
    def work(self, *, breaks=False):
        if breaks and self.ranks.rank == self.by:
            raise MemoryError("no room for it")
        return int(self.ranks.summed(torch.ones(1)))


class Late:
    """A learner that divides layers, of which one rank is late."""

    def __init__(self, model, *, ranks):
        self.ranks = ranks
        self._learning, self._within = ranks.place(model)

    @everywhere
    def read(self, *, seconds):
        if self.ranks.rank == 1:
            time.sleep(seconds)
        with torch.no_grad():
            return self._within(lambda: self._learning(input_ids=torch.arange(4)[None]).logits.sum())


def _run(variables, arguments):
    os.environ.update(variables)
    sys.argv = ["strop", *arguments]
    main()


def running(*arguments, **variables):
    """A command of strop, in a process with these variables."""
    process = _context().Process(target=_run, args=(variables, [str(a) for a in arguments]), daemon=True)
    process.start()
    return Forked(process)


def sleeping():
    """A process that never comes up."""
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    process.start()
    started.append(Forked(process))
    return started[-1]
