"""A rank of a run as an actor: what runs in its process."""

from __future__ import annotations

import os
import pickle
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.types import StropError

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux


@dataclass(frozen=True)
class Place:
    """Where an actor is. `port` is free there."""

    node: str
    host: str
    pid: int
    port: int


@dataclass(frozen=True)
class Task:
    """What the ranks are to do: `work` is strop.train or strop.sft."""

    work: Callable[..., Any]
    config: Any
    resume: bool | str
    allow_change: Sequence[str]
    folder: str  # to work in, where there is such a folder
    reads_files: bool  # what the config names on disk was not looked at before


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: of rank 0 what the run returned, or the error that strop raised on purpose."""

    result: Any = None
    error: StropError | None = None


class RankActor:
    """Rank 0 runs the loop; the others do what it asks for. Each is a process that a launcher has started (see `is_launched`).

    Args:
        rank: its number.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __repr__(self) -> str:
        return f"rank {self._rank}"  # what Ray puts before the lines that it prints

    def place(self, folder: str) -> Place:
        """Where it is. It works in the folder from now on, where there is such a folder."""
        import ray

        if os.path.isdir(folder):
            os.chdir(folder)
        with socket.socket() as found:
            found.bind(("", 0))
            port = found.getsockname()[1]
        node = ray.get_runtime_context().get_node_id()
        return Place(node, ray.util.get_node_ip_address(), os.getpid(), port)

    def run(self, variables: dict[str, str], task: Task) -> Outcome:
        """Be the rank until the run is over."""
        os.environ.update(variables)
        _choose_interface(variables["MASTER_ADDR"])
        if self._rank > 0:
            from strop.runtime.rank import serve

            trainer = task.config.trainer
            serve(timeout_s=trainer.process_timeout_s, num_threads=trainer.num_threads)  # it reports to rank 0
            return Outcome()
        try:
            return Outcome(_run(task))
        except StropError as error:
            return Outcome(error=_portable(error))

    def newest_checkpoint(self, folder: str) -> str:
        """The newest checkpoint of a run folder, and when it was written; "" without one."""
        from strop.runtime.checkpoints import has_checkpoints, newest_checkpoint
        from strop.runtime.run_folder import RunFolder

        checkpoints = RunFolder(Path(folder)).checkpoints
        if not has_checkpoints(checkpoints):
            return ""
        found = newest_checkpoint(checkpoints, warn=lambda words: None)[0]
        return f"{found.name} {found.stat().st_mtime_ns}"


def _run(task: Task) -> Any:
    from strop.config.files import check_files
    from strop.observe.console import TerminalConsole

    if task.reads_files:
        check_files(task.config, trains=True)
    console = TerminalConsole(title=task.config.folder.name)
    return task.work(task.config, resume=task.resume, allow_change=task.allow_change, console=console)


def _portable(error: StropError) -> StropError:
    """An error that another process can read."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - an argument of it that cannot travel
        return StropError(str(error))
    return error


def _choose_interface(master: str) -> None:
    """Gloo looks its own address up by the machine's name, which may resolve to nothing: ranks of one machine take its
    loopback, others the interface that Ray reaches them at."""
    from strop.runtime.rank import LOOPBACK, loopback

    if master == LOOPBACK:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    elif "GLOO_SOCKET_IFNAME" not in os.environ:
        import ray

        name = _interface_of(ray.util.get_node_ip_address())
        if name:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _interface_of(address: str) -> str:
    """The network interface with an IPv4 address; "" where none is found."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                found = fcntl.ioctl(asks.fileno(), _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""
