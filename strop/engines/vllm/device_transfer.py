"""Weights from GPU to GPU, by vLLM's own two sides. NOT RUN in this project: both ways need GPUs, and vLLM in strop's own
environment.

`nccl`: for each server a group of its own: this process is rank 0, the server's workers follow. vLLM's trainer side announces
names, types and shapes, has the workers wait, and broadcasts one tensor after the other. `ipc`: for a server on the same GPU,
which is told where in its memory the tensors are. A worker cannot compare with its model's names over these ways, so these are
compared here, with those of the model that the servers began with.
"""

from __future__ import annotations

import asyncio
import socket
from importlib.util import find_spec
from typing import Any, Literal

from strop.config import VLLMEngineOptions
from strop.engines.served.process import free_port
from strop.engines.vllm.server import VLLMServer
from strop.engines.vllm.transfer import FilesTransfer
from strop.types import UserError, WeightSource


def transfer_of(options: VLLMEngineOptions) -> FilesTransfer | DeviceTransfer:
    """The way that the config names.

    Raises:
        UserError: it needs what is not there.
    """
    if options.transfer == "files":
        return FilesTransfer(options.transfer_folder, changes_only=options.transfer_changes_only)
    return DeviceTransfer(options.transfer)


class DeviceTransfer:
    """The ways of vLLM's backends `nccl` and `ipc`.

    Raises:
        UserError: vLLM cannot be imported here.
    """

    def __init__(self, backend: Literal["nccl", "ipc"]) -> None:
        self.backend = backend
        if find_spec("vllm") is None:
            raise UserError(
                f"engine.transfer = {backend} needs vLLM in strop's own environment, and it cannot be imported. Install it, or "
                "use engine.transfer = files."
            )
        self._weights: WeightSource = []
        self._label = ""
        self._groups: dict[tuple[str, int], Any] = {}  # by server and how often it was lost

    async def prepare(self, weights: WeightSource, label: str) -> None:
        """Nothing is copied: the trainer does not learn until the weights are delivered. What is made for this alone has to
        stay, within one GPU, until the server has read it there."""
        self._weights, self._label = list(weights) if self.backend == "ipc" else weights, label

    async def meet(self, server: VLLMServer) -> None:
        """Each server is told of a group of its own when it is given weights."""

    async def deliver(self, server: VLLMServer) -> int:
        """Have one server take them. The calls to it are made on this loop, while a thread of vLLM's waits for them."""
        key = (server.address, server.generation)
        if key not in self._groups:
            self._groups = {k: group for k, group in self._groups.items() if k[0] != server.address}
            client, source = _Client(server, asyncio.get_running_loop()), _Source(self._weights)
            workers = int((await server.ask("GET", "/get_world_size"))["world_size"])
            self._groups[key] = await asyncio.to_thread(_open_group, self.backend, client, source, workers)
        group = self._groups[key]
        group.source.weights, group.client.label = self._weights, self._label
        await asyncio.to_thread(group.send_weights)
        await server.check_label(self._label)
        return sum(tensor.nbytes for _, tensor in self._weights)

    def close(self) -> None:
        for group in self._groups.values():
            group.shutdown()
        self._groups, self._weights = {}, []


class _Client:
    """A server as vLLM's trainer side calls it, from a thread."""

    def __init__(self, server: VLLMServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server, self._loop, self.label = server, loop, ""

    def _wait(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(self._server.timeout_s + 10)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._wait(self._server.init_transfer(init_info))

    def start_weight_update(self) -> None:
        self._wait(self._server.start_update())

    def update_weights(self, update_info: Any) -> None:
        from vllm.distributed.weight_transfer.clients import _json_safe_update_payload

        self._wait(self._server.ask_worker("/update_weights", {"update_info": _json_safe_update_payload(update_info)}))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._wait(self._server.ask("POST", "/finish_weight_update", {"weight_version": weight_version or self.label}))


class _Source:
    """Weights as vLLM's trainer side reads them."""

    def __init__(self, weights: WeightSource) -> None:
        self.weights = weights

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights]

    def __iter__(self) -> Any:
        return ((name, tensor.detach()) for name, tensor in self.weights)


def _open_group(backend: str, client: _Client, source: _Source, num_workers: int) -> Any:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    if backend == "ipc":
        info: Any = IPCTrainerInitInfo(rank=0)
    else:
        address, port = socket.gethostbyname(socket.gethostname()), free_port("")
        info = NCCLTrainerInitInfo(rank=0, master_address=address, master_port=port, world_size=num_workers + 1)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)  # type: ignore[arg-type]
