"""One prompt becomes a group of rollouts: the policy answers once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from strop.types import Completion, Engine, EngineError, GenerateRequest, Group, Prompt, Rollout, Sampling

Decode = Callable[[Sequence[int]], str]


async def sample_group(
    engine: Engine, prompt: Prompt, *, group_id: int, seeds: Sequence[int], sampling: Sampling, decode: Decode
) -> Group:
    """Sample one rollout per seed.

    Raises:
        EngineError: the engine gives another number of samples.
    """
    request = GenerateRequest(prompt.tokens, tuple(seeds), sampling)
    completions = await engine.generate(request)
    if len(completions) != len(seeds):
        raise EngineError(
            f"the engine must give {len(seeds)} samples of prompt row {prompt.row}, got {len(completions)}."
        )
    rollouts = (_rollout(prompt, group_id, i, completion, decode) for i, completion in enumerate(completions))
    return Group(group_id, prompt, tuple(rollouts))


def _rollout(prompt: Prompt, group_id: int, sample: int, completion: Completion, decode: Decode) -> Rollout:
    """The ids as they were sampled, behind the prompt's ids; text is only decoded, never encoded again."""
    before = len(prompt.tokens)
    return Rollout(
        prompt=prompt,
        group_id=group_id,
        sample=sample,
        tokens=prompt.tokens + completion.tokens,
        response_mask=(False,) * before + (True,) * len(completion.tokens),
        rollout_logprobs=(0.0,) * before + completion.logprobs,
        policy_versions=(-1,) * before + completion.policy_versions,
        finish_reason=completion.finish_reason,
        text=decode(completion.tokens),
    )
