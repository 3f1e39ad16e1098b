"""The ranks as Megatron-Core arranges them: those side by side divide layers, then come shares of a batch, then stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from strop.config import MegatronTrainerOptions
from strop.trainers.megatron.environment import load_megatron
from strop.trainers.ranks import Ranks
from strop.types import StepMetrics, merge_metrics

T = TypeVar("T")
_arranged: tuple[Any, int, int] | None = None  # the process group of all ranks, and how they were arranged in it


class Groups(Ranks):
    """Which part of model and batch this rank has. All ranks must make one, at the same time.

    Args:
        ranks: several, or one, over torch.distributed.
        options: the table `[trainer]`.
    """

    def __init__(self, ranks: Ranks, options: MegatronTrainerOptions) -> None:
        self._ranks = ranks
        self.rank, self.size = ranks.rank, ranks.size
        self.tensor_parallel, self.pipeline_parallel = options.tensor_parallel, options.pipeline_parallel
        _arrange(self.tensor_parallel, self.pipeline_parallel, timeout_s=options.process_timeout_s)
        from megatron.core import parallel_state

        self.layer_rank = parallel_state.get_tensor_model_parallel_rank()
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        self.share = parallel_state.get_data_parallel_rank()
        self.num_shares = parallel_state.get_data_parallel_world_size()
        self.is_first_stage, self.is_last_stage = self.stage == 0, self.stage == self.pipeline_parallel - 1
        self.layers = parallel_state.get_tensor_model_parallel_group()

    @property
    def counts(self) -> bool:
        """True for the one rank of a share that measures."""
        return self.is_last_stage and self.layer_rank == 0

    def first(self, work: Callable[[], T]) -> T | None:
        return self._ranks.first(work)

    def told(self, value: T) -> T:
        return self._ranks.told(value)

    def collected(self, value: T) -> list[T]:
        return self._ranks.collected(value)

    def merged(self, metrics: StepMetrics) -> StepMetrics:
        found = self.collected(metrics if self.counts else None)
        return merge_metrics([one for one in found if one is not None])

    def summed(self, numbers: Tensor) -> Tensor:
        """Numbers on the host, of the ranks that count."""
        if not self.counts:
            numbers.zero_()
        dist.all_reduce(numbers)
        return numbers

    def reduce_bits(self, numbers: Tensor) -> None:
        """Bring float32 numbers to rank 0, of which each is 0 in all ranks but one: the bits of zeros, too, are kept."""
        dist.reduce(numbers.view(torch.int32), dst=0)

    def send(self, numbers: Tensor) -> None:
        """Set a tensor to what rank 0 has in it."""
        dist.broadcast(numbers, src=0)


def _arrange(tensor_parallel: int, pipeline_parallel: int, *, timeout_s: float) -> None:
    """Megatron-Core's groups, which are the process's; those of ranks that are gone make room."""
    global _arranged
    load_megatron()
    from megatron.core import parallel_state

    wanted = dist.group.WORLD, tensor_parallel, pipeline_parallel
    if _arranged == wanted:
        return
    if _arranged is not None:
        parallel_state.destroy_model_parallel()
    _arranged = None
    minutes: Any = timeout_s / 60  # it takes fractions
    parallel_state.initialize_model_parallel(
        tensor_parallel, pipeline_parallel, distributed_timeout_minutes=minutes, create_gloo_process_groups=False
    )
    _arranged = wanted
