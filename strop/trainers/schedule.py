"""The learning rate as a function of optimizer steps."""

from __future__ import annotations

import math
from typing import Literal


def lr_factor(
    step: int, *, total_steps: int, warmup_steps: int, schedule: Literal["constant", "linear", "cosine"]
) -> float:
    """Share of the peak learning rate for optimizer step `step`, counted from 0.

    Rises linearly over the warm-up (step 0 already moves), then stays, or falls to 0 at `total_steps`.

    >>> [lr_factor(k, total_steps=20, warmup_steps=0, schedule="linear") for k in (0, 10, 20)]
    [1.0, 0.5, 0.0]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    return 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
