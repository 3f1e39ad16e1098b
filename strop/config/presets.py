"""Presets: a paper's settings, expanded to explicit values before anything else is read."""

from __future__ import annotations

from typing import Any

# name -> (source, values by option under `algorithm`)
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": (
        "DeepSeekMath, arXiv:2402.03300, section 4.2",
        {
            "policy_loss": {"kind": "ppo_clip", "eps_clip": 0.2},
            "advantage": {"kind": "group", "normalize_std": True},
            "kl": {"coef": 0.04, "kind": "k3"},
            "reduction": "sequence_mean",
        },
    ),
    "dr_grpo": (
        "Understanding R1-Zero-like training, arXiv:2503.20783, section 3.2",
        {
            "policy_loss": {"kind": "ppo_clip", "eps_clip": 0.2},
            "advantage": {"kind": "group", "normalize_std": False},
            "kl": {"coef": 0.0},
            "reduction": "constant_length",
        },
    ),
    "cispo": (
        "MiniMax-M1, arXiv:2506.13585, section 3.1",
        {
            "policy_loss": {"kind": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0},
            "advantage": {"kind": "group", "normalize_std": True},
            "kl": {"coef": 0.0},
            "reduction": "token_mean",
        },
    ),
}

# Under this flag users of slime name the presets.
ESTIMATOR_FLAG = "advantage_estimator"
