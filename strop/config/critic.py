"""Options of the critic, the model that foresees rewards."""

from __future__ import annotations

from pydantic import Field

from strop.config.training import AdamWOptions


class CriticOptions(AdamWOptions):
    """The value model of algorithm.advantage.kind = gae, and AdamW for it. Types, device, layout and micro-batches are those
    of the policy; it makes one optimizer step with every one of the policy's."""

    path: str | None = Field(
        default=None,
        description="A folder to begin from: critic/ of another run, or a language model whose body gets a new value head; "
        "none means a copy of the policy's body with a new head.",
    )
    lr: float = Field(default=1e-5, ge=1e-12, description="Peak learning rate.")
    eps_clip_value: float | None = Field(
        default=0.2,
        gt=0,
        description="How far a value may move from that before the batch and still be pulled on, in units of reward; none "
        "means as far as it likes.",
    )
    only_first_steps: int = Field(
        default=0, ge=0, description="In so many batches at the start only the critic learns, and the policy stays."
    )
