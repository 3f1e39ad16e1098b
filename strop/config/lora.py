"""Options of low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from strop.config.base import Idle, Options, Problem

ALL_LINEAR = "all-linear"


class LoraOptions(Options):
    """Low-rank adapters (LoRA): the model's own weights stay, and what is learned is added to its matrices as a product of two
    narrow ones. They have no dropout: the sampler and the trainer must be the same policy."""

    rank: int | None = Field(
        default=None, ge=1, description="Width of the narrow matrices; none means no adapters: all weights learn."
    )
    alpha: float = Field(default=32.0, gt=0, description="What adapters add is multiplied by alpha / rank.")
    target_modules: tuple[str, ...] = Field(
        default=(ALL_LINEAR,),
        description="Ends of the names of the layers that get adapters, such as q_proj; all-linear means every linear layer "
        "but the head.",
    )

    @property
    def is_on(self) -> bool:
        return self.rank is not None

    def problems(self) -> Iterator[Problem]:
        if not self.target_modules:
            yield Problem("target_modules", "must name at least one layer, got []: nothing would be learned.")
        if ALL_LINEAR in self.target_modules and len(self.target_modules) > 1:
            yield Problem("target_modules", f"must be names or {ALL_LINEAR} alone, got {list(self.target_modules)}.")

    def idle(self) -> Iterator[Idle]:
        if not self.is_on:
            yield Idle("alpha", "is only used with lora.rank")
            yield Idle("target_modules", "is only used with lora.rank")

    def choices(self) -> dict[str, list[Any]]:
        return {"target_modules": [("q_proj",), (ALL_LINEAR,)]}
