"""The way of weights to SGLang servers over files: a folder that looks like a model's to them."""

from __future__ import annotations

from pathlib import Path

from strop.engines.served import transfer
from strop.engines.sglang.server import SGLangServer
from strop.engines.vllm.remote.strop_weights import write_files
from strop.types import WeightSource


class FilesTransfer(transfer.FilesTransfer):
    """Over files; see `transfer.FilesTransfer`. What was read is not confirmed by a checksum: SGLang offers none of the tensors
    as they were written."""

    def __init__(self, folder: str | None) -> None:
        super().__init__(folder)
        self._num_bytes, self._label = 0, ""

    def _write(self, weights: WeightSource, label: str, folder: Path) -> None:
        self._num_bytes, self._label = write_files(weights, folder), label

    async def meet(self, server: SGLangServer) -> None:
        """Nothing has to be said before."""

    async def deliver(self, server: SGLangServer) -> int:
        await server.read(str(self._written), self._label)
        return self._num_bytes
