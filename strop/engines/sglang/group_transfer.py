"""Weights from GPU to GPU, over a group of processes that a server's ranks join. NOT RUN over NCCL or against SGLang in this
project: only over gloo, against a small server that joins and receives as SGLang does.

For each server a group of its own: this process is rank 0, the server's ranks follow. SGLang makes its side of a group by a
function of torch's that has no public form, and whoever sends has to do the same, in the same version of torch or nearly so.
SGLang does not say which names its model has: names and shapes are compared here, with those of the model that the servers
began with.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor

from strop.config import SGLangEngineOptions
from strop.engines.served.fleet import together
from strop.engines.served.process import free_port
from strop.engines.sglang.server import SGLangServer
from strop.engines.sglang.transfer import FilesTransfer
from strop.types import UserError, WeightSource

_BUCKET_BYTES = 512 << 20  # of tensors that are sent after one request

Named = tuple[str, Tensor]


def transfer_of(options: SGLangEngineOptions) -> FilesTransfer | GroupTransfer:
    """The way that the config names."""
    if options.transfer == "files":
        return FilesTransfer(options.transfer_folder)
    return GroupTransfer("nccl", timeout_s=options.request_timeout_s)


class GroupTransfer:
    """Over a group of processes.

    Args:
        backend: of torch.distributed: nccl for GPUs.
        timeout_s: in which the other side must join, and take each tensor.
    """

    def __init__(self, backend: Literal["nccl", "gloo"], *, timeout_s: float) -> None:
        self._backend, self._timeout_s = backend, timeout_s
        self._weights: WeightSource = []
        self._label = ""
        self._groups: dict[tuple[str, int], tuple[str, Any]] = {}  # by server and how often it was lost: name and group

    async def prepare(self, weights: WeightSource, label: str) -> None:
        """Nothing is copied: the trainer does not learn until the weights are delivered."""
        self._weights, self._label = weights, label

    async def meet(self, server: SGLangServer) -> None:
        """Raises UserError where the ranks of a server are not what its group would have."""
        if server.num_copies > 1:
            raise UserError(
                f"engine.transfer must be files for {server!r}: it divides its model by layers or holds it several times, and "
                "SGLang takes weights of a group by tensor parallelism alone."
            )

    async def deliver(self, server: SGLangServer) -> int:
        """Have one server take them: each request says what is sent meanwhile."""
        name, group = await self._group_of(server)
        num_bytes = 0
        await server.begin_update()
        try:
            for bucket, is_last in _buckets(self._weights):
                receive = server.receive(name, bucket, self._label if is_last else None)
                await together([receive, asyncio.to_thread(self._send, group, bucket)])
                num_bytes += sum(tensor.nbytes for _, tensor in bucket)
        finally:
            await server.end_update()
        await server.check_label(self._label)
        return num_bytes

    async def _group_of(self, server: SGLangServer) -> tuple[str, Any]:
        key = (server.address, server.generation)
        if key not in self._groups:
            self._groups = {k: group for k, group in self._groups.items() if k[0] != server.address}
            host, name, size = socket.gethostbyname(socket.gethostname()), f"strop-{self._label}", server.num_ranks + 1
            name, port = f"{name}-{len(self._groups)}-{server.generation}", free_port("")
            asked = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": size}
            join = server.join({**asked, "group_name": name, "backend": self._backend})
            _, group = await together([join, asyncio.to_thread(self._open, host, port, name, size)])
            self._groups[key] = name, group
        return self._groups[key]

    def _open(self, host: str, port: int, name: str, size: int) -> Any:
        """This process' side of a group, made as SGLang makes its own."""
        from torch.distributed import distributed_c10d as c10d

        limit = timedelta(seconds=self._timeout_s)
        store, rank, size = next(c10d.rendezvous(f"tcp://{host}:{port}", 0, size, timeout=limit))
        store.set_timeout(limit)
        backend, inner = c10d.Backend(self._backend), c10d.PrefixStore(name, store)
        group, _ = c10d._new_process_group_helper(size, rank, [], backend, inner, group_name=name, timeout=limit)
        return group

    def _send(self, group: Any, bucket: list[Named]) -> None:
        device = "cuda" if self._backend == "nccl" else "cpu"
        sent = [tensor.detach().to(device).contiguous() for _, tensor in bucket]
        for work in [group.broadcast(tensor, 0) for tensor in sent]:
            work.wait()
        if device == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        self._groups, self._weights = {}, []


def _buckets(weights: WeightSource) -> Iterator[tuple[list[Named], bool]]:
    """Tensors in their order, so many at a time, and whether they are the last."""
    bucket: list[Named] = []
    for name, tensor in weights:
        if bucket and sum(held.nbytes for _, held in bucket) + tensor.nbytes > _BUCKET_BYTES:
            yield bucket, False
            bucket = []
        bucket.append((name, tensor))
    yield bucket, True
