"""One sample as SGLang is asked for it and as it answers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from strop.engines.served.server import check_finite, end_of_sample, versions_of
from strop.types import Completion, EngineError, GenerateRequest

GENERATE = "/generate"  # token ids in, token ids out, each with the version of its weights


def sample_body(request: GenerateRequest, seed: int, stop_ids: Collection[int], label: str) -> dict[str, Any]:
    """One sample with a random stream of its own. `label` keeps what the server remembers of prompts apart by the weights that
    read them: as extra_key, which a router passes on (it drops cache_salt). With ignore_eos SGLang would look at no end id at
    all, so that ends of its model end a sample, too; `read_sample` refuses one that is not named here. Penalties and min_p are
    named because a server may have defaults of its own."""
    sampling = request.sampling
    return {
        "input_ids": list(request.prompt_tokens),
        "extra_key": label,
        "return_logprob": True,
        "stream": False,
        "sampling_params": {
            "n": 1,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "sampling_seed": seed,
            "max_new_tokens": sampling.max_response_tokens,
            "stop_token_ids": sorted({*stop_ids, *sampling.stop_token_ids}),
            "ignore_eos": False,
            "no_stop_trim": True,
            "skip_special_tokens": False,
        },
    }


def read_sample(
    answer: Any, request: GenerateRequest, stop_ids: Collection[int], versions: Mapping[str, int]
) -> Completion:
    """What came back, checked; see `Server.sample`."""
    try:
        about = answer["meta_info"]
        tokens = tuple(int(token) for token in answer["output_ids"])
        entries = about.get("output_token_logprobs") or ()
        logprobs = tuple(math.nan if entry[0] is None else float(entry[0]) for entry in entries)
        same = tokens == tuple(entry[1] for entry in entries)
        spans = about.get("weight_versions") or ()
        num_versions = sum(span["end"] - span["start"] for span in spans)
        reason, matched = about["finish_reason"]["type"], about["finish_reason"].get("matched")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        fault = f"{type(error).__name__}: {error}"
        raise EngineError(f"an SGLang server's answer to {GENERATE} is not in its protocol ({fault}).") from error
    if matched == "NaN happened":  # in place of a token that is none
        check_finite([math.nan])
    if not same or num_versions != len(tokens):
        raise EngineError(f"an SGLang server must give a log-probability and a version with every token of {GENERATE}.")
    of_tokens = versions_of(spans, versions)
    check_finite(logprobs)
    if reason == "stop" and tokens and tokens[-1] not in {*stop_ids, *request.sampling.stop_token_ids}:
        raise EngineError(
            f"SGLang takes token {tokens[-1]} for an end of this model, and strop does not: name it in "
            "rollout.stop_token_ids, or start the server with a model folder that does not."
        )
    end = end_of_sample(reason, tokens, request, stop_ids, name="an SGLang server")
    return Completion(tokens, logprobs, of_tokens, end)
