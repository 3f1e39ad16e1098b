"""One sample as vLLM is asked for it and as it answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from strop.types import Completion, EngineError, FinishReason, GenerateRequest, GuardError

GENERATE = "/inference/v1/generate"  # token ids in, token ids out, each with the version of its weights
_IMPOSSIBLE = -9999.0  # how the server writes minus infinity and NaN


class ForeignWeightsError(Exception):
    """Tokens were sampled by weights that this run did not give the server."""


def sample_body(request: GenerateRequest, seed: int, stop_ids: Iterable[int], label: str) -> dict[str, Any]:
    """One sample with a random stream of its own. The end ids are those that are named here alone. `label` keeps what the
    server remembers of prompts apart by the weights that read them."""
    sampling = request.sampling
    return {
        "token_ids": list(request.prompt_tokens),
        "cache_salt": label,
        "sampling_params": {
            "n": 1,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": seed,
            "max_tokens": sampling.max_response_tokens,
            "stop_token_ids": sorted({*stop_ids, *sampling.stop_token_ids}),
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
        },
    }


def read_sample(
    answer: Any, request: GenerateRequest, stop_ids: Iterable[int], versions: Mapping[str, int]
) -> Completion:
    """What came back, checked.

    Args:
        answer: of the server.
        request: what it was asked for.
        stop_ids: end ids beside those of the request.
        versions: label to policy version of the weights that the server was given.

    Raises:
        ForeignWeightsError: other weights sampled a token.
        GuardError: a log-probability is not finite.
        EngineError: the answer is not one to the request.
    """
    try:
        choice = answer["choices"][0]
        tokens = tuple(int(token) for token in choice["token_ids"] or ())
        content = (choice["logprobs"] or {}).get("content") or []
        logprobs = tuple(float(entry["logprob"]) for entry in content)
        same = tokens == tuple(entry["token_id"] for entry in content)
        spans = [(span["version"], span["end"] - span["start"]) for span in choice.get("weight_versions") or ()]
        reason = choice["finish_reason"]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        fault = f"{type(error).__name__}: {error}"
        raise EngineError(f"a vLLM server's answer to {GENERATE} is not in its protocol ({fault}).") from error
    if not same or sum(length for _, length in spans) != len(tokens):
        raise EngineError(f"a vLLM server must give a log-probability and a version with every token of {GENERATE}.")
    if any(label not in versions for label, _ in spans):
        raise ForeignWeightsError
    if any(not logprob > _IMPOSSIBLE for logprob in logprobs):
        raise GuardError(
            "the engine's logits are not finite: the model is broken, or its last update broke it.", guard="non_finite"
        )
    of_tokens = tuple(versions[label] for label, length in spans for _ in range(length))
    return Completion(tokens, logprobs, of_tokens, _finish_reason(reason, tokens, request, stop_ids))


def _finish_reason(
    said: str, tokens: tuple[int, ...], request: GenerateRequest, stop_ids: Iterable[int]
) -> FinishReason:
    """An end id exactly at the limit is "stop"."""
    if said == "abort":
        return "abort"
    if tokens and tokens[-1] in {*stop_ids, *request.sampling.stop_token_ids}:
        return "stop"
    if len(tokens) == request.sampling.max_response_tokens:
        return "length"
    raise EngineError(
        f"a vLLM server ended a sample after {len(tokens)} of {request.sampling.max_response_tokens} tokens, without an end "
        f"token, and calls that {said!r}."
    )
