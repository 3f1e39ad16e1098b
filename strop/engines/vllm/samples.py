"""One sample as vLLM is asked for it and as it answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from strop.engines.served.server import check_finite, end_of_sample, versions_of
from strop.types import Completion, EngineError, GenerateRequest

SCORE = {
    "max_tokens": 1,
    "prompt_logprobs": 0,
    "temperature": 0.0,
    "detokenize": False,
}  # log-probabilities of a prompt
GENERATE = "/inference/v1/generate"  # token ids in, token ids out, each with the version of its weights


def sample_body(request: GenerateRequest, seed: int, stop_ids: Collection[int], label: str) -> dict[str, Any]:
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
    answer: Any, request: GenerateRequest, stop_ids: Collection[int], versions: Mapping[str, int]
) -> Completion:
    """What a server sent, checked; see `Server.sample`."""
    try:
        choice = answer["choices"][0]
        tokens = tuple(int(token) for token in choice["token_ids"] or ())
        content = (choice["logprobs"] or {}).get("content") or []
        logprobs = tuple(float(entry["logprob"]) for entry in content)
        same = tokens == tuple(entry["token_id"] for entry in content)
        spans = choice.get("weight_versions") or ()
        num_versions = sum(span["end"] - span["start"] for span in spans)
        reason = choice["finish_reason"]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        fault = f"{type(error).__name__}: {error}"
        raise EngineError(f"a vLLM server's answer to {GENERATE} is not in its protocol ({fault}).") from error
    if not same or num_versions != len(tokens):
        raise EngineError(f"a vLLM server must give a log-probability and a version with every token of {GENERATE}.")
    of_tokens = versions_of(spans, versions)
    check_finite(logprobs)
    end = end_of_sample(reason, tokens, request, stop_ids, name="a vLLM server")
    return Completion(tokens, logprobs, of_tokens, end)
