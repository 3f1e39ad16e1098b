"""A rank of a trainer other than rank 0: comes up, does what rank 0 asks for, and goes when that goes.

`main` is one that rank 0 has started; torchrun's ranks call `serve_if_asked`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from strop.config import ProcessesOptions
from strop.runtime.models import set_threads
from strop.types import StropError

if TYPE_CHECKING:
    from strop.trainers.together import Lost, TogetherRanks

CAME, REPORT = "strop/came/{}", "strop/report/{}"
WAITED = "waited: "  # a report that begins so is of a rank that another one failed
TIMEOUT_S, NUM_THREADS = "STROP_PROCESS_TIMEOUT_S", "STROP_NUM_THREADS"
LOOPBACK = "127.0.0.1"
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux


def is_launched() -> bool:
    """True where torchrun, or what sets the same variables, started this process as one of several."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def is_served() -> bool:
    """True where this process does what another one asks for."""
    return is_launched() and int(os.environ["RANK"]) > 0


def meeting_place() -> dist.Store:
    """The store that the variables of the environment name."""
    return next(dist.rendezvous("env://"))[0]


def join(
    store: dist.Store,
    rank: int,
    size: int,
    *,
    timeout_s: float,
    lost: Lost | None = None,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
) -> TogetherRanks:
    """Join the others; how layers and rows are divided counts in rank 0. The GPU branch is not run in this project's CI."""
    from strop.trainers.together import TogetherRanks  # a second to import, for several processes alone

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("strop", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    return TogetherRanks(
        timeout_s=timeout_s,
        local_rank=local_rank,
        lost=lost,
        tensor_parallel=tensor_parallel,
        context_parallel=context_parallel,
    )


def serve(*, timeout_s: float, num_threads: int | None) -> int:
    """Be a rank until rank 0 lets go; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 hears them, and ends this rank when it is done
        signal.signal(number, signal.SIG_IGN)
    set_threads(num_threads)
    rank, store = int(os.environ["RANK"]), meeting_place()
    store.set(CAME.format(rank), str(os.getpid()))
    ranks = join(store, rank, int(os.environ["WORLD_SIZE"]), timeout_s=timeout_s)
    try:
        ranks.serve()
    except BaseException as error:  # noqa: BLE001 - told to rank 0, which ends the run with it
        _report(store, rank, error)
        return 1
    dist.destroy_process_group()
    return 0


def serve_if_asked(options: ProcessesOptions) -> None:
    """In a process that a launcher started beside rank 0: be a rank, and exit when rank 0 lets go."""
    if is_served():
        sys.exit(serve(timeout_s=options.process_timeout_s, num_threads=options.num_threads))


def _report(store: dist.Store, rank: int, error: BaseException) -> None:
    waited = is_of_connection(error)
    if not (waited or isinstance(error, StropError)):
        traceback.print_exc()
    words = str(error) if isinstance(error, StropError) else f"{type(error).__name__}: {error}"
    try:
        store.set(REPORT.format(rank), f"{WAITED if waited else ''}{words}")
    except (RuntimeError, dist.DistError):  # rank 0 is gone: there is nobody to tell
        return


def is_of_connection(error: BaseException | None) -> bool:
    """True for what torch.distributed raises when another rank does not answer, also where it is the cause of the error."""
    while error is not None:
        text = str(error)
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def loopback() -> str:
    """The interface for processes of one machine, whose own name may resolve to nothing."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def _end_with_parent() -> None:
    """No rank outlives the process that started it; Linux kills even one that hangs."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="watches the parent").start()


def main() -> None:
    """A rank that rank 0 has started."""
    _end_with_parent()
    sys.exit(serve(timeout_s=float(os.environ[TIMEOUT_S]), num_threads=int(os.environ[NUM_THREADS])))
