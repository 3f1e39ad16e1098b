"""Weights from GPU to GPU over NCCL, by vLLM's own two sides. NOT RUN in this project: it needs GPUs on both sides, and vLLM
in strop's own environment.

For each server a group of its own: this process is rank 0, the server's workers follow. vLLM's trainer side announces names,
types and shapes, has the workers wait, and broadcasts one tensor after the other. A worker cannot compare with its model's
names over this way, so these are compared here, with those of the model that the servers began with.
"""

from __future__ import annotations

import asyncio
import socket
from importlib.util import find_spec
from typing import Any

from strop.engines.vllm.server import Server
from strop.types import EngineError, UserError, WeightSource


class NCCLTransfer:
    """The way of vLLM's backend `nccl`.

    Raises:
        UserError: vLLM cannot be imported here.
    """

    backend = "nccl"
    init_info: dict[str, Any] = {}  # noqa: RUF012 - unused: each server is told of its own group

    def __init__(self) -> None:
        if find_spec("vllm") is None:
            raise UserError(
                "engine.transfer = nccl needs vLLM in strop's own environment, and it cannot be imported. Install it, or use "
                "engine.transfer = files."
            )
        self._weights: WeightSource = []  # type: ignore[assignment]
        self._label = ""
        self._groups: dict[tuple[str, int], Any] = {}  # by server and how often it was lost

    async def prepare(self, weights: WeightSource, label: str) -> None:
        """Nothing is copied: the trainer does not learn until the weights are delivered."""
        self._weights, self._label = weights, label

    async def deliver(self, server: Server) -> int:
        """Broadcast to one server. The calls to it are made on this loop, while a thread of vLLM's waits for them."""
        weights = list(self._weights)
        loop = asyncio.get_running_loop()
        key = (server.address, server.generation)
        if key not in self._groups:
            workers = int((await server.ask("GET", "/get_world_size"))["world_size"])
            self._groups = {k: group for k, group in self._groups.items() if k[0] != server.address}
            self._groups[key] = await asyncio.to_thread(_open_group, _Client(server, loop), _Source(weights), workers)
        group = self._groups[key]
        group.source.weights = weights
        group.client.label = self._label
        await asyncio.to_thread(group.send_weights)
        found = (await server.ask("GET", "/weight_info"))["weight_version"]
        if found != self._label:
            raise EngineError(f"{server!r} must hold weights {self._label} after its update, and says {found}.")
        return sum(tensor.nbytes for _, tensor in weights)

    def close(self) -> None:
        for group in self._groups.values():
            group.shutdown()
        self._groups = {}


class _Client:
    """A server as vLLM's trainer side calls it, from a thread."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self._server, self._loop, self.label = server, loop, ""

    def _wait(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(self._server.timeout_s + 10)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._wait(self._server.ask("POST", "/init_weight_transfer_engine", {"init_info": init_info}))

    def start_weight_update(self) -> None:
        self._wait(self._server.start_update())

    def update_weights(self, update_info: Any) -> None:
        self._wait(self._server.ask_worker("/update_weights", {"update_info": update_info}))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._wait(self._server.ask("POST", "/finish_weight_update", {"weight_version": weight_version or self.label}))


class _Source:
    """Weights as vLLM's trainer side reads them."""

    def __init__(self, weights: list[tuple[str, Any]]) -> None:
        self.weights = weights

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights]

    def __iter__(self) -> Any:
        return ((name, tensor.detach()) for name, tensor in self.weights)


def _open_group(client: _Client, source: _Source, num_workers: int) -> Any:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    with socket.socket() as found:
        found.bind(("", 0))
        port = found.getsockname()[1]
    info = NCCLTrainerInitInfo(
        rank=0, master_address=socket.gethostbyname(socket.gethostname()), master_port=port, world_size=num_workers + 1
    )
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)  # type: ignore[arg-type]
