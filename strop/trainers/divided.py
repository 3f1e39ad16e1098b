"""A model that is divided over ranks against the one that it was made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from strop.trainers.rows import are_equal, gap
from strop.trainers.sharding import Within
from strop.types import UserError


@torch.no_grad()
def check_divided(
    whole: Any,
    divided: Any,
    within: Within,
    first: Callable[[Callable[[], None]], object],
    refusal: Callable[[str], UserError],
) -> None:
    """Compare hidden states of a row.

    Args:
        whole: the model, in rank 0.
        divided: this rank's part of it, whose passes are made within `within`.
        first: has rank 0 do something.
        refusal: an error that says why the model cannot be divided.

    Raises:
        UserError: the divided model cannot run, or its hidden states are others.
    """

    def read(model: Any) -> Tensor:
        row = torch.arange(5, device=next(model.parameters()).device)[None]
        row = row % model.config.get_text_config().vocab_size
        return model.base_model(input_ids=row, use_cache=False).last_hidden_state

    try:
        found = within(lambda: read(divided))
    except Exception as error:  # another library's model raises whatever it likes
        raise refusal(f"divided it cannot run ({type(error).__name__}: {error})") from error

    def compare() -> None:
        wanted = read(whole)
        if not are_equal(found, wanted, rounding=1e-4):  # sums over ranks, in another order
            off = gap(found, wanted)
            raise refusal(f"divided it does not compute the same (numbers differ by {off:.2g})")

    first(compare)
