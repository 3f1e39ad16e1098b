"""The way of weights to vLLM servers over files: a parcel that strop's own code in the server reads and checks."""

from __future__ import annotations

import asyncio
from pathlib import Path

from torch import Tensor

from strop.engines.served import transfer
from strop.engines.vllm.remote.strop_weights import Parcel, write_changes, write_whole
from strop.engines.vllm.server import VLLMServer
from strop.types import WeightSource

FILES_BACKEND = "strop_files"  # as remote/strop_vllm.py names it to vLLM


class FilesTransfer(transfer.FilesTransfer):
    """Over files; see `transfer.FilesTransfer`.

    Args:
        folder: where a folder is made for them, as the servers see it, too; None means a temporary one.
        changes_only: after the first time only what changed is written, and a copy of all weights is kept on both sides.
    """

    backend = FILES_BACKEND  # in vLLM's --weight-transfer-config

    def __init__(self, folder: str | None, *, changes_only: bool) -> None:
        super().__init__(folder)
        self._changes_only = changes_only
        self._parcel: Parcel | None = None
        self._last: dict[str, Tensor] = {}  # all weights as they were written last, where only changes are

    def _write(self, weights: WeightSource, label: str, folder: Path) -> None:
        if self._changes_only and self._parcel is not None:
            self._parcel = write_changes(weights, self._last, folder, label, self._parcel.checksum)
            return
        if self._changes_only:
            self._last = {name: tensor.detach().cpu().clone() for name, tensor in weights}
        self._parcel = write_whole(weights, folder, label)

    async def meet(self, server: VLLMServer) -> None:
        await server.init_transfer({"keeps_copy": self._changes_only})

    async def deliver(self, server: VLLMServer) -> int:
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
        super().close()
        self._parcel, self._last = None, {}
