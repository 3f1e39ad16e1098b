"""How weights reach vLLM servers: one interface, and the way over files. (The engine `torch` samples from the trainer's own
weights: nothing is carried there.)"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from strop.engines.vllm.remote.strop_weights import Parcel, write_changes, write_whole
from strop.engines.vllm.server import Server
from strop.types import UserError, WeightSource

FILES_BACKEND = "strop_files"  # as remote/strop_vllm.py names it to vLLM


class WeightTransfer(Protocol):
    """Carries weights, whole or not at all, in two acts: `prepare` once, then `deliver` to each server, again to one that was
    lost. While a server takes weights it is paused."""

    backend: str  # in vLLM's --weight-transfer-config
    init_info: dict[str, Any] | None  # told to each server when it is up; None: the way does that itself

    async def prepare(self, weights: WeightSource, label: str) -> None:
        """Make these the weights that are delivered from now on."""
        ...

    async def deliver(self, server: Server) -> int:
        """Give a server the weights; the bytes that this moved."""
        ...

    def close(self) -> None: ...


class FilesTransfer:
    """Over safetensors files in a folder that both sides can read; below /dev/shm that is shared memory.

    Args:
        folder: where a folder is made for them, as the servers see it, too; None means a temporary one.
        changes_only: after the first time only what changed is written, and a copy of all weights is kept on both sides.
    """

    backend = FILES_BACKEND

    def __init__(self, folder: str | None, *, changes_only: bool) -> None:
        self._parent, self._changes_only = folder, changes_only
        self.init_info = {"keeps_copy": changes_only}
        self._folder: Path | None = None
        self._parcel: Parcel | None = None
        self._last: dict[str, Tensor] = {}  # all weights as they were written last, where only changes are
        self._count = 0

    async def prepare(self, weights: WeightSource, label: str) -> None:
        """Write them. The loop goes on meanwhile."""
        try:
            await asyncio.to_thread(self._write, weights, label)
        except OSError as error:
            place = self._parent or tempfile.gettempdir()
            raise UserError(
                f"engine.transfer_folder must be a folder with room for the weights, got {place!r}: {error.strerror or error}."
            ) from error

    def _write(self, weights: WeightSource, label: str) -> None:
        before = self._parcel
        if self._changes_only and before is not None:
            self._parcel = write_changes(weights, self._last, self._new_folder(), label, before.checksum)
        else:
            if self._changes_only:
                self._last = {name: tensor.detach().cpu().clone() for name, tensor in weights}
            self._parcel = write_whole(weights, self._new_folder(), label)
        if before is not None:
            shutil.rmtree(before.folder, ignore_errors=True)

    def _new_folder(self) -> Path:
        if self._folder is None:
            if self._parent is not None:
                Path(self._parent).mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix="strop-weights-", dir=self._parent)).absolute()
            self._folder.chmod(0o755)  # a server may run as somebody else
        self._count += 1
        return self._folder / f"{self._count:06d}"

    async def deliver(self, server: Server) -> int:
        assert self._parcel is not None, "prepared before"
        parcel = self._parcel
        if parcel.kind == "changes" and server.checksum != parcel.base:
            parcel = await asyncio.to_thread(self._whole, parcel)
        server.checksum = ""
        await server.take(parcel.as_json(), parcel.version)
        server.checksum = parcel.checksum
        return parcel.num_bytes

    def _whole(self, parcel: Parcel) -> Parcel:
        """The same weights for a server that lacks what the changes are to be applied to."""
        folder = Path(parcel.folder) / "whole"
        return write_whole(self._last.items(), folder, parcel.version)

    def close(self) -> None:
        """Remove the files."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder, self._parcel, self._last = None, None, {}
