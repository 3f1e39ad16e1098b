"""rollouts/*.jsonl: sampled texts and their scores, for reading."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from strop.types import Rollout


def write_rollouts(path: Path, rollouts: Iterable[Rollout]) -> None:
    """One rollout a line: what was asked, what was answered, what it earned."""
    with path.open("w", encoding="utf-8") as file:
        for r in rollouts:
            row = {
                "prompt_row": r.prompt.row,
                "sample": r.sample,
                "prompt": r.prompt.text,
                "response": r.text,
                "label": r.prompt.label,
                "reward": r.reward,
                "excluded": r.excluded,
                "finish_reason": r.finish_reason,
                "num_response_tokens": r.num_response_tokens,
                "tokens": r.tokens,
                "rollout_logprobs": [
                    round(x, 6) for x, m in zip(r.rollout_logprobs, r.response_mask, strict=True) if m
                ],
            }
            if r.reward_parts is not None:
                row["reward_parts"] = dict(r.reward_parts)
            if r.token_rewards is not None:  # as the log-probabilities: one for each token that the policy wrote
                row["token_rewards"] = [x for x, m in zip(r.token_rewards, r.response_mask, strict=True) if m]
            if r.length_penalty is not None:  # part of the reward
                row["length_penalty"] = r.length_penalty
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
