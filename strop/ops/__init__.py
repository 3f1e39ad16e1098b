"""The mathematics of RL post-training as pure functions on tensors. Needs torch, nothing else."""

from strop.ops.advantages import group_advantages, whiten
from strop.ops.kl import kl_estimate
from strop.ops.logprobs import LinearLogprobs, linear_logprobs, logits_entropy, token_logprobs
from strop.ops.policy_loss import TokenLoss, cispo, dual_clipped, ppo_clip
from strop.ops.weights import token_weights

__all__ = [
    "LinearLogprobs",
    "TokenLoss",
    "cispo",
    "dual_clipped",
    "group_advantages",
    "kl_estimate",
    "linear_logprobs",
    "logits_entropy",
    "ppo_clip",
    "token_logprobs",
    "token_weights",
    "whiten",
]
