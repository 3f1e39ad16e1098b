"""How weights reach servers: one interface, and what every way over files has. (The engine `torch` samples from the trainer's
own weights: nothing is carried there.)"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol

from strop.types import UserError, WeightSource


class WeightTransfer(Protocol):
    """Carries weights, whole or not at all, in two acts: `prepare` once, then `deliver` to each server, again to one that was
    lost. While a server takes weights it is paused."""

    async def prepare(self, weights: WeightSource, label: str) -> None:
        """Make these the weights that are delivered from now on."""
        ...

    async def meet(self, server: Any) -> None:
        """Tell a server that is up how weights will come."""
        ...

    async def deliver(self, server: Any) -> int:
        """Give a server the weights; the bytes that this moved."""
        ...

    def close(self) -> None: ...


class FilesTransfer(ABC):
    """Over safetensors files in a folder that both sides can read; below /dev/shm that is shared memory.

    Args:
        folder: where a folder is made for them, as the servers see it, too; None means a temporary one.
    """

    def __init__(self, folder: str | None) -> None:
        self._parent, self._count = folder, 0
        self._folder: Path | None = None
        self._written: Path | None = None  # below it, the newest weights

    async def prepare(self, weights: WeightSource, label: str) -> None:
        """Write them. The loop goes on meanwhile."""
        try:
            await asyncio.to_thread(self._replace, weights, label)
        except OSError as error:
            place = self._parent or tempfile.gettempdir()
            raise UserError(
                f"engine.transfer_folder must be a folder with room for the weights, got {place!r}: {error.strerror or error}."
            ) from error

    def _replace(self, weights: WeightSource, label: str) -> None:
        """Write them into a new folder, and remove the one before."""
        before, self._written = self._written, self._new_folder()
        self._write(weights, label, self._written)
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)

    @abstractmethod
    def _write(self, weights: WeightSource, label: str, folder: Path) -> None: ...

    @abstractmethod
    async def deliver(self, server: Any) -> int: ...

    def _new_folder(self) -> Path:
        if self._folder is None:
            if self._parent is not None:
                Path(self._parent).mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix="strop-weights-", dir=self._parent)).absolute()
            self._folder.chmod(0o755)  # a server may run as somebody else
        self._count += 1
        return self._folder / f"{self._count:06d}"

    def close(self) -> None:
        """Remove the files."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = self._written = None
