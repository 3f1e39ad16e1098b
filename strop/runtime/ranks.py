"""The ranks of a trainer as rank 0 has them: started or joined, watched, and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from strop.config import ProcessesOptions, TorchTrainerOptions
from strop.runtime.rank import (
    CAME,
    LOOPBACK,
    NUM_THREADS,
    REPORT,
    TIMEOUT_S,
    WAITED,
    is_launched,
    is_of_connection,
    join,
    loopback,
    meeting_place,
)
from strop.trainers import Ranks
from strop.types import ConfigError, LostRankError, ModelError, StropError, WaitError

if TYPE_CHECKING:
    from strop.trainers.together import TogetherRanks

_END_S = 10.0  # from letting the others go until they are killed
_SETTLE_S = 5.0  # within which it shows what became of a rank that does not answer


class Process(Protocol):
    """What is needed of a started process; a subprocess.Popen has it."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def start_process(variables: dict[str, str]) -> Process:
    """A rank with these variables in its environment; Ctrl-C does not reach it."""
    return subprocess.Popen(
        [sys.executable, "-c", "from strop.runtime.rank import main; main()"],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


@contextmanager
def open_ranks(options: ProcessesOptions, *, device: torch.device) -> Iterator[Ranks]:
    """The ranks that `[trainer]` asks for, or that a launcher has started, for as long as this lasts.

    Args:
        options: the table `[trainer]`.
        device: that the model is on.

    Raises:
        UserError: there are other processes, or fewer GPUs, than are asked for.
        WaitError: a process did not come up.
    """
    size = num_ranks(options)
    divided = (1, 1)  # of ranks that a trainer arranges itself
    if isinstance(options, TorchTrainerOptions):
        if size == 1:
            yield Ranks()
            return
        check_several(size)
        divided = options.tensor_parallel, options.context_parallel
    if device.type == "cuda" and not is_launched() and torch.cuda.device_count() < size:  # not run in this project's CI
        raise ModelError(
            f"trainer.num_processes must be at most the number of GPUs, {torch.cuda.device_count()}, got {size}. "
            "Each process needs one of its own; set model.device = cpu to do without."
        )
    group = _Others(options.process_timeout_s)
    try:
        with _interface():
            store = group.meet() if is_launched() else group.start(size)
            group.ranks = join(
                store,
                0,
                size,
                timeout_s=options.process_timeout_s,
                lost=group.lost,
                tensor_parallel=divided[0],
                context_parallel=divided[1],
            )
        yield group.ranks
    finally:
        group.end()


def check_several(size: int) -> None:
    """Raises ConfigError where this torch cannot train over so many processes."""
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise ConfigError(
            f"trainer.num_processes must be 1 with torch {torch.__version__}, got {size}: it needs 2.9 or newer."
        )


def num_ranks(options: ProcessesOptions) -> int:
    """How many there are to be.

    Raises:
        ConfigError: a launcher has started another number than was asked for.
    """
    if not is_launched():
        return options.num_processes
    size = int(os.environ["WORLD_SIZE"])
    if options.num_processes not in (1, size):
        raise ConfigError(
            f"trainer.num_processes must be {size}, the number of processes that were launched, or be left out, got "
            f"{options.num_processes}."
        )
    return size


@contextmanager
def _interface() -> Iterator[None]:
    """Processes of this machine meet at its loopback; those of a launcher where the environment says."""
    name, before = "GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME")
    if before is None and not is_launched():
        os.environ[name] = loopback()
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


class _Others:
    """The other ranks: their processes where they were started here, and what they said last."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._processes: dict[int, Process] = {}
        self._store: dist.Store | None = None
        self.ranks: TogetherRanks | None = None

    def meet(self) -> dist.Store:
        """The place where those that a launcher has started meet."""
        self._store = meeting_place()
        return self._store

    def start(self, size: int) -> dist.Store:
        """Start the processes, and wait until all have come up; returns the place where all meet."""
        self._store = store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        given = {"WORLD_SIZE": size, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": store.port}
        given |= {NUM_THREADS: torch.get_num_threads(), TIMEOUT_S: self._timeout_s}
        for rank in range(1, size):
            mine = given | {"RANK": rank, "LOCAL_RANK": rank}
            self._processes[rank] = start_process({name: str(value) for name, value in mine.items()})
        until, missing = time.monotonic() + self._timeout_s, set(self._processes)
        while missing := {rank for rank in missing if not store.check([CAME.format(rank)])}:
            ended = next((rank for rank in missing if self._processes[rank].poll() is not None), None)
            if ended is not None:
                raise StropError(f"{self._name(ended)} of the trainer {self._fate(ended)} before it came up.")
            if time.monotonic() > until:
                raise WaitError(f"{self._names(missing)} of the trainer did not come up within {self._limit}.")
            time.sleep(0.01)
        return store

    @property
    def _limit(self) -> str:
        return f"trainer.process_timeout_s = {self._timeout_s:g} s"

    def lost(self, error: BaseException) -> BaseException:
        """What to raise for an error after which the ranks are out of step; the others are ended."""
        found = self._explained(error) if is_of_connection(error) else error
        self.end(at_once=True)
        return found

    def _explained(self, error: BaseException) -> StropError:
        """Which rank it was, of those that do not answer. One that was failed by another says so, and is not to blame."""
        until = time.monotonic() + _SETTLE_S
        others = range(1, self.ranks.size if self.ranks else 1)
        while True:
            said = {rank: report for rank in others if (report := self._report(rank))}
            failed = next((rank for rank, report in said.items() if not report.startswith(WAITED)), None)
            if failed is not None:
                return StropError(f"{self._name(failed)} of the trainer failed: {said[failed]}")
            silent = set(others) - set(said)
            ended = next((rank for rank in silent if self._fate(rank)), None)
            if ended is not None:
                return LostRankError(f"{self._name(ended)} of the trainer {self._fate(ended)}. The step was not made.")
            is_alone = len(silent) == 1 and "imed out" in str(error)  # nobody else has still to say that it waited
            if time.monotonic() > until or not silent or is_alone:
                break
            time.sleep(0.02)
        if not silent:
            return StropError(f"the processes of the trainer lost one another: {error}")
        return LostRankError(
            f"{self._names(silent)} of the trainer did not answer within {self._limit}. The step was not made."
        )

    def _report(self, rank: int) -> str:
        key = REPORT.format(rank)
        return self._store.get(key).decode() if self._store is not None and self._store.check([key]) else ""

    def _name(self, rank: int) -> str:
        process = self._processes.get(rank)
        return f"rank {rank}" + (f" (process {process.pid})" if process else "")

    def _names(self, ranks: set[int]) -> str:
        return " and ".join(self._name(rank) for rank in sorted(ranks))

    def _fate(self, rank: int) -> str:
        """How a process that was started here ended; "" while it runs."""
        code = self._processes[rank].poll() if rank in self._processes else None
        if code is None:
            return ""
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def end(self, *, at_once: bool = False) -> None:
        """Let the others go, end those that were started here, and leave the group."""
        at_once = at_once or self.ranks is None
        if self.ranks is not None:
            self.ranks.end()
        until = time.monotonic() + (0.0 if at_once else _END_S)
        for process in self._processes.values():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes = {}
        if dist.is_initialized():
            dist.destroy_process_group()
