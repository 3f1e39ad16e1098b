"""Activation checkpointing: layers keep their inputs alone, and the backward pass computes the rest again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from strop.trainers.sharding import Within
from strop.types import UserError


class Recompute:
    """Switches activation checkpointing on around optimizer steps, if it is asked for.

    transformers checkpoints layers in training mode, and a model of strop is never in it: dropout would make the sampler and
    the trainer two policies. So the checkpointed layers alone are put into it; a layer that then drops something out itself
    shows in numbers and is refused.

    Args:
        model: a Hugging Face model.
        is_on: the option trainer.activation_checkpointing.
        within: of a sharded model, what its passes are made within.

    Raises:
        UserError: the model has no layers that can be checkpointed, or they would drop something out.
    """

    def __init__(self, model: Any, *, is_on: bool, within: Within | None = None) -> None:
        self._layers: list[torch.nn.Module] = []
        if not is_on:
            return
        name = type(model).__name__
        refused = f"trainer.activation_checkpointing must be false for {name}, got true:"
        if not model.supports_gradient_checkpointing:
            raise UserError(f"{refused} transformers has no activation checkpointing for it.")
        # its name in newer versions of transformers, then in older ones; the argument's place is the same
        for method in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
            if hasattr(model, method):
                getattr(model, method)({"use_reentrant": False})
                break
        self._layers = [layer for layer in model.modules() if vars(layer).get("gradient_checkpointing") is True]
        row = torch.arange(4, device=next(model.parameters()).device)[None] % model.config.get_text_config().vocab_size
        plain = _read(model, row, within)
        with self.around_step():
            if not torch.equal(plain, _read(model, row, within)):
                raise UserError(
                    f"{refused} its layers drop something out when they are checkpointed. Set its dropout to 0."
                )

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Forward and backward passes of a step go inside."""
        try:
            for layer in self._layers:
                layer.training = True  # of the layer itself, not of what is in it
            yield
        finally:
            for layer in self._layers:
                layer.training = False


@torch.no_grad()
def _read(model: Any, row: torch.Tensor, within: Within | None) -> torch.Tensor:
    def work() -> torch.Tensor:
        return model(input_ids=row, use_cache=False)[0]

    return work() if within is None else within(work)
