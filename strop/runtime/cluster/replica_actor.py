"""A sampler of a cluster as an actor: a model of its own, which is given the trainer's weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from strop.config import ModelOptions
from strop.types import Completion, GenerateRequest

Packed = Mapping[str, np.ndarray]  # name to the bytes of a tensor [num_bytes], as Ray carries them without a copy


def pack(tensor: Any) -> np.ndarray:
    """The bytes of a tensor of any type; no copy of one that lies in host memory without gaps."""
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


class ReplicaActor:
    """Samples by the engine `torch` in a process of its own.

    Args:
        number: of the replica.
        options: `[model]`.
        stop_token_ids: ids that end a response.
        engine: what the engine `torch` takes beside.
        num_threads: of torch.
        folder: to work in, where there is such a folder.
        variables: of the environment, set before torch is imported.
    """

    def __init__(
        self,
        number: int,
        options: ModelOptions,
        *,
        stop_token_ids: frozenset[int],
        engine: Mapping[str, Any],
        num_threads: int,
        folder: str,
        variables: Mapping[str, str],
    ) -> None:
        os.environ.update(variables)
        from strop.engines import TorchEngine
        from strop.runtime.models import load_model, set_threads

        self._number = number
        if Path(folder).is_dir():
            os.chdir(folder)
        set_threads(num_threads)
        model = load_model(options).model
        self._engine = TorchEngine(model, stop_token_ids=stop_token_ids, **engine)

    def __repr__(self) -> str:
        return f"replica {self._number}"

    async def place(self) -> str:
        """Where it is."""
        import ray

        return f"{ray.util.get_node_ip_address()} (process {os.getpid()})"

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        return await self._engine.generate(request)

    async def logprobs(self, tokens: Sequence[int]) -> list[float]:
        return await self._engine.logprobs(tokens)

    async def take(self, packed: Packed, shapes: Mapping[str, tuple[int, ...]], policy_version: int) -> str:
        """Take weights; returns the checksum of what the model then holds."""
        import torch

        from strop.engines.fit import check_weights
        from strop.engines.vllm.remote.strop_weights import checksum_of

        own = dict(self._engine.model.named_parameters())
        check_weights(shapes, {name: tuple(p.shape) for name, p in own.items()}, of="a replica's model")
        given = {
            name: torch.from_numpy(packed[name].copy()).view(parameter.dtype).reshape(parameter.shape)
            for name, parameter in own.items()
        }
        await self._engine.update_weights(given.items(), policy_version)
        return checksum_of((name, parameter.detach().cpu()) for name, parameter in own.items())
