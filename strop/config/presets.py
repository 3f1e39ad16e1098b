"""Presets: a paper's settings, expanded to explicit values before anything else is read."""

from __future__ import annotations

from typing import Any

_GROUP = {"kind": "group", "normalize_std": True}
_NO_KL = {"coef": 0.0}

# name -> (source, values by option under `algorithm`)
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": (
        "DeepSeekMath, arXiv:2402.03300, section 4.2",
        {
            "policy_loss": {"kind": "ppo_clip", "eps_clip": 0.2},
            "advantage": _GROUP,
            "kl": {"coef": 0.04, "kind": "k3"},
            "reduction": "sequence_mean",
        },
    ),
    "dr_grpo": (
        "Understanding R1-Zero-like training, arXiv:2503.20783, section 3.2",
        {
            "policy_loss": {"kind": "ppo_clip", "eps_clip": 0.2},
            "advantage": {"kind": "group", "normalize_std": False},
            "kl": _NO_KL,
            "reduction": "constant_length",
        },
    ),
    "dapo": (
        "DAPO, arXiv:2503.14476, section 3",
        {
            "policy_loss": {"kind": "ppo_clip", "eps_clip": 0.2, "eps_clip_high": 0.28},
            "advantage": _GROUP,
            "kl": _NO_KL,
            "reduction": "token_mean",
        },
    ),
    "cispo": (
        "MiniMax-M1, arXiv:2506.13585, section 3.1",
        {
            "policy_loss": {"kind": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0},
            "advantage": _GROUP,
            "kl": _NO_KL,
            "reduction": "token_mean",
        },
    ),
    "gspo": (
        "GSPO, arXiv:2507.18071, section 5.1",
        {
            "policy_loss": {"kind": "gspo", "eps_clip": 3e-4, "eps_clip_high": 4e-4},
            "advantage": _GROUP,
            "kl": _NO_KL,
            "reduction": "sequence_mean",
        },
    ),
    "rloo": (
        "Back to basics, arXiv:2402.14740, section 3",
        {
            "policy_loss": {"kind": "reinforce"},
            "advantage": {"kind": "rloo"},
            "kl": _NO_KL,
            "reduction": "token_mean",
        },
    ),
    "reinforce_plus_plus": (
        "REINFORCE++, arXiv:2501.03262, section 3",
        {
            "policy_loss": {"kind": "ppo_clip", "eps_clip": 0.2},
            "advantage": {"kind": "reinforce_plus_plus", "gamma": 1.0},
            "kl": {"coef": 0.01, "kind": "k1", "place": "reward"},
            "reduction": "token_mean",
        },
    ),
    "reinforce_plus_plus_baseline": (
        "REINFORCE++, arXiv:2501.03262, section 3",
        {
            "policy_loss": {"kind": "ppo_clip", "eps_clip": 0.2},
            "advantage": {"kind": "reinforce_plus_plus_baseline"},
            "kl": {"coef": 0.01, "kind": "k2", "place": "loss"},
            "reduction": "token_mean",
        },
    ),
    "sapo": (
        "SAPO, arXiv:2511.20347, section 4",
        {
            "policy_loss": {"kind": "sapo", "tau_pos": 1.0, "tau_neg": 1.05},
            "advantage": _GROUP,
            "kl": _NO_KL,
            "reduction": "sequence_mean",
        },
    ),
    "gmpo": (
        "GMPO, arXiv:2507.20673, section 3",
        {
            "policy_loss": {"kind": "gmpo", "eps_clip": 0.4, "eps_clip_high": 0.4},
            "advantage": _GROUP,
            "kl": _NO_KL,
            "reduction": "sequence_mean",
        },
    ),
    "topr": (
        "TOPR, arXiv:2503.14286, section 3",
        {
            "policy_loss": {"kind": "topr", "max_ratio": 1.0},
            "advantage": {"kind": "group", "normalize_std": False},
            "kl": _NO_KL,
            "reduction": "token_mean",
        },
    ),
    # The clip of the first paper, the rest as in Ouyang et al. 2022 (arXiv:2203.02155), appendix C.4: KL of 0.02 in the
    # reward, gamma 1, lambda 0.95, value clip 0.2.
    "ppo": (
        "PPO, arXiv:1707.06347, with the KL penalty of InstructGPT, arXiv:2203.02155",
        {
            "policy_loss": {"kind": "ppo_clip", "eps_clip": 0.2},
            "advantage": {"kind": "gae", "gamma": 1.0, "lam": 0.95, "whiten": True},
            "kl": {"coef": 0.02, "kind": "k1", "place": "reward"},
            "reduction": "token_mean",
        },
    ),
    # What the paper sets beside its losses (critic.only_first_steps, learning rates, group size) is the reader's to set.
    "vapo": (
        "VAPO, arXiv:2504.05118, section 4",
        {
            "policy_loss": {"kind": "ppo_clip", "eps_clip": 0.2, "eps_clip_high": 0.28},
            "advantage": {"kind": "gae", "gamma": 1.0, "lam_value": 1.0, "length_adaptive_alpha": 0.05, "whiten": True},
            "likelihood_coef": 0.1,
            "kl": _NO_KL,
            "reduction": "token_mean",
        },
    ),
}

# name -> values of other tables that belong to the method
_OTHER_TABLES: dict[str, dict[str, Any]] = {
    "dapo": {"filter": {"equal_rewards": True}, "length_penalty": {"kind": "soft_overlong", "penalty_coef": 1.0}},
}


def preset_values(name: str) -> dict[str, Any]:
    """What a preset sets, by table and option."""
    return {"algorithm": PRESETS[name][1], **_OTHER_TABLES.get(name, {})}


# Under this flag users of slime name the presets.
ESTIMATOR_FLAG = "advantage_estimator"
