"""Ranks for tests: real processes that do what strop.runtime.rank does, forked from one that has imported everything."""

import multiprocessing
import os
import subprocess
import sys
from contextlib import contextmanager

import torch

from strop.config import TorchTrainerOptions
from strop.runtime import rank, ranks


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


def start(variables):
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload(["rank_processes", "tiny_models", "torch.distributed.fsdp", "strop.trainers.together"])
    process = context.Process(target=_serve, args=(variables,), daemon=True)
    process.start()
    return Forked(process)


@contextmanager
def opened(num_processes, *, process_timeout_s=60.0):
    """Ranks, this process being rank 0."""
    options = TorchTrainerOptions(num_processes=num_processes, process_timeout_s=process_timeout_s)
    torch.set_num_threads(1)
    with ranks.open_ranks(options, device=torch.device("cpu"), start=start) as found:
        yield found
