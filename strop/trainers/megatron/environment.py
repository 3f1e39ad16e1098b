"""Can Megatron-Core's layers be used here? Asked before a model is loaded."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import Any

import torch

from strop.types import UserError

_FAMILY = "0.16"
_CHATTER = (  # of how it calls torch, which a user cannot change
    r"The \.grad attribute of a Tensor that is not a leaf Tensor",
    r"`torch\.distributed\.\w+` is deprecated",
)


def check_megatron(device: torch.device) -> None:
    """Raises UserError where the extra is not installed, or the device is none that it computes on."""
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise UserError(
            "trainer.kind = megatron needs the package megatron-core, which is not installed. pip install 'strop[megatron]'."
        )
    check_device(device)  # before the import, which takes seconds
    megatron = load_megatron()
    if not megatron.core.__version__.startswith(f"{_FAMILY}."):
        raise UserError(
            f"trainer.kind = megatron needs megatron-core {_FAMILY}, found {megatron.core.__version__}. "
            "pip install 'strop[megatron]'."
        )


def load_megatron() -> Any:
    """Import all that is used of it, without its words on what else could be installed."""
    for message in _CHATTER:
        warnings.filterwarnings("ignore", message=message)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core
        import megatron.core.distributed
        import megatron.core.models.gpt
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel
        import megatron.core.tensor_parallel
    return megatron


def matrix_modules() -> list[type[torch.nn.Module]]:
    """The modules whose matrices a model is made of."""
    layers = load_megatron().core.tensor_parallel
    return [layers.ColumnParallelLinear, layers.RowParallelLinear, layers.VocabParallelEmbedding]


def check_device(device: torch.device) -> None:
    """Raises UserError for a device that Megatron-Core does not compute on."""
    if device.type != "cuda":
        raise UserError(
            f"trainer.kind must be torch where model.device is {device.type}, got megatron: Megatron-Core computes on CUDA "
            "alone."
        )
