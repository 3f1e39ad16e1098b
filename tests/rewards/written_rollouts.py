"""Rollouts as a sampler would have made them."""

from strop.types import Prompt, Rollout


def make_rollout(text, label=None, *, row=0, sample=0, prompt="q", finish_reason="stop", excluded=None):
    return Rollout(
        Prompt(row, (5, 6), prompt, label=label),
        group_id=row,
        sample=sample,
        tokens=(5, 6, 9, 2),
        response_mask=(False, False, True, True),
        rollout_logprobs=(0.0, 0.0, -0.5, -0.1),
        policy_versions=(-1, -1, 3, 3),
        finish_reason=finish_reason,
        text=text,
        excluded=excluded,
    )
