"""Options of the guards: what is out of bounds, and what is done about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from strop.config.base import Idle, Options

Action = Literal["stop", "skip", "rollback"]


class GuardOptions(Options):
    """What stops an update before the optimizer, and what then becomes of the run."""

    max_logprob_gap: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=True,
        description="Largest mean |engine - trainer| log-probability of the sampled tokens, in nats; none means 0.001 for "
        "float32 and 0.1 for bfloat16, inf means never.",
    )
    max_loss_jump: float | None = Field(
        default=None,
        gt=1,
        description="Largest |loss| of an update, as a multiple of the median over the last window_steps; none means never.",
    )
    max_kl_jump: float | None = Field(
        default=None,
        gt=1,
        description="Largest KL of an update, as a multiple of the median over the last window_steps: to the reference with "
        "algorithm.kl.coef above 0, else to the old policy; none means never.",
    )
    window_steps: int = Field(
        default=20,
        ge=1,
        description="Steps over which jumps take their median, from the third step on; so many skipped steps in a row "
        "stop the run.",
    )
    on_non_finite: Action = Field(
        default="stop",
        description="Where a loss or gradient is not finite: stop, skip the step, or go back to the last checkpoint and on "
        "with the next prompts.",
    )
    on_logprob_gap: Action = Field(default="stop", description="The same, beyond max_logprob_gap.")
    on_loss_jump: Action = Field(default="stop", description="The same, beyond max_loss_jump.")
    on_kl_jump: Action = Field(default="stop", description="The same, beyond max_kl_jump.")
    max_rollbacks: int = Field(
        default=3, ge=1, description="How often a run goes back to a checkpoint before a guard stops it after all."
    )

    @property
    def actions(self) -> dict[str, Action]:
        """What is done, by the name of the guard."""
        return {
            "non_finite": self.on_non_finite,
            "logprob_gap": self.on_logprob_gap,
            "loss_jump": self.on_loss_jump,
            "kl_jump": self.on_kl_jump,
        }

    @property
    def looks_for_jumps(self) -> bool:
        return self.max_loss_jump is not None or self.max_kl_jump is not None

    def idle(self) -> Iterator[Idle]:
        for name in ("loss_jump", "kl_jump"):
            if getattr(self, f"max_{name}") is None:
                yield Idle(f"on_{name}", f"is only used when guards.max_{name} is set")
        if not self.looks_for_jumps and "skip" not in self.actions.values():
            yield Idle(
                "window_steps",
                "is only used when guards.max_loss_jump or guards.max_kl_jump is set, or an action is skip",
            )
        if "rollback" not in self.actions.values():
            yield Idle("max_rollbacks", "is only used when an action of [guards] is rollback")
