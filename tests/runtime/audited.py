"""Configs whose options are audited, and what an audit must not find."""

from strop.runtime.audit import FAILURES

BASE = {
    "model": {"path": "nowhere"},
    "data": {"kind": "jsonl", "path": "nowhere.jsonl"},
    "reward": {"kind": "exact"},
    "rollout": {"group_size": 4},
}
# Tables that idle together are switched on; kinds that stand for themselves are looked at by every_kind.
EVERYTHING = {
    "model": {"path": "nowhere"},
    "data": {"kind": "reasoning_gym", "name": "chain_sum"},
    "reward": {"kind": "dataset"},
    "algorithm": {
        "updates_per_batch": 2,
        "policy_loss": {"kind": "ppo_clip", "eps_clip_c": 3.0},
        "kl": {"coef": 0.01, "target": 0.1},
        "correction": {"kind": "truncate"},
        "entropy_target": 1.0,
    },
    "eval": {"data": {"kind": "reasoning_gym", "name": "chain_sum"}},
    "run": {"checkpoint_every_steps": 50},
}

# Every guard may act, and none has the default action.
GUARDED = BASE | {
    "algorithm": {"updates_per_batch": 2},
    "guards": {
        "max_loss_jump": 9.0,
        "max_kl_jump": 9.0,
        "on_non_finite": "rollback",
        "on_logprob_gap": "skip",
        "on_loss_jump": "skip",
        "on_kl_jump": "rollback",
    },
    "run": {"checkpoint_every_steps": 50},
}

FILTERED = BASE | {
    "rollout": {"group_size": 4, "prompts_per_round": 48, "max_tokens_in_flight": 100_000},
    "filter": {"equal_rewards": True, "group": "nowhere.py:f", "group_kind": "slime", "rollout": "nowhere.py:g"},
}


def failures(findings):
    return [f"{f.path} ({f.variant})" for f in findings if f.verdict in FAILURES]
