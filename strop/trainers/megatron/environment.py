"""Can Megatron-Core's layers be used here? Asked before a model is loaded."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from strop.types import UserError

_FAMILY = "0.16"


def check_megatron(device: torch.device) -> None:
    """Raises UserError where the extra is not installed, or the device is none that it computes on."""
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise UserError(
            "trainer.kind = megatron needs the package megatron-core, which is not installed. pip install 'strop[megatron]'."
        )
    import megatron.core

    if not megatron.core.__version__.startswith(f"{_FAMILY}."):
        raise UserError(
            f"trainer.kind = megatron needs megatron-core {_FAMILY}, found {megatron.core.__version__}. "
            "pip install 'strop[megatron]'."
        )
    check_device(device)


def check_device(device: torch.device) -> None:
    """Raises UserError for a device that Megatron-Core does not compute on."""
    if device.type != "cuda":
        raise UserError(
            f"trainer.kind must be torch where model.device is {device.type}, got megatron: Megatron-Core computes on CUDA "
            "alone."
        )
