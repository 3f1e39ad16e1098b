"""Whether weights are those of a model: names and shapes, looked at before anything is copied or sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from strop.engines.vllm.remote.strop_weights import WrongWeights, check_fits
from strop.types import ModelError


def to_read_twice(weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    """Weights that are looked at first and carried then: a list where they could be read once only."""
    return list(weights) if iter(weights) is weights else weights


def check_weights(given: Mapping[str, tuple[int, ...]], own: Mapping[str, tuple[int, ...]], *, of: str) -> None:
    """Refuse weights of another model.

    Args:
        given: name to shape of what came.
        own: the same of what the model has.
        of: whose model it is, for the message.

    Raises:
        ModelError: it lists missing and unexpected names, or the shapes that differ.
    """
    try:
        check_fits(given, own)
    except WrongWeights as error:
        raise ModelError(f"weights do not fit {of}: {error}") from None
