"""What fits a model: weights by names and shapes, and requests by their length, looked at before anything is copied or sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from strop.engines.vllm.remote.strop_weights import WrongWeights, check_fits
from strop.types import GenerateRequest, ModelError, UserError


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


def check_request(request: GenerateRequest, limit: int | None, *, of: str, or_else: str = "") -> None:
    """Refuse a request that is empty, or longer than the model reads.

    Args:
        limit: positions that it reads; none or 0: as many as there are.
        of: whose positions they are, for the message.
        or_else: what may be done beside shortening it.

    Raises:
        UserError: it says what to do.
    """
    if not request.prompt_tokens:
        raise UserError("a prompt must have at least one token.")
    if limit and request.num_positions > limit:
        ways = ["Lower the response limit", "shorten prompts", *([or_else] if or_else else [])]
        raise UserError(
            f"prompt and response must fit {of} {limit} positions, got {len(request.prompt_tokens)} prompt tokens + "
            f"{request.sampling.max_response_tokens} response tokens. {', '.join(ways[:-1])} or {ways[-1]}."
        )
