"""Policy losses: each maps per-token tensors of one shape E* to an unreduced loss of that shape.

How losses are averaged is not decided here: the caller multiplies by token weights (`strop.ops.token_weights`) and
sums. Masked tokens are to be selected out before the call; losses that look at whole sequences take the mask too.
"""

from strop.ops.policy_loss.aspo import aspo
from strop.ops.policy_loss.cispo import cispo
from strop.ops.policy_loss.covariance import (
    clip_cov,
    covariances,
    covariances_in_band,
    kl_cov,
    largest_covariances,
)
from strop.ops.policy_loss.dppo import DEFAULT_MAX_DIVERGENCE, dppo
from strop.ops.policy_loss.gmpo import gmpo
from strop.ops.policy_loss.gspo import gspo, gspo_token
from strop.ops.policy_loss.ppo import dual_clipped, ppo_clip
from strop.ops.policy_loss.ratio import MAX_LOG_RATIO, TokenLoss
from strop.ops.policy_loss.reinforce import importance_sampling, reinforce, topr
from strop.ops.policy_loss.sapo import sapo

__all__ = [
    "DEFAULT_MAX_DIVERGENCE",
    "MAX_LOG_RATIO",
    "TokenLoss",
    "aspo",
    "cispo",
    "clip_cov",
    "covariances",
    "covariances_in_band",
    "dppo",
    "dual_clipped",
    "gmpo",
    "gspo",
    "gspo_token",
    "importance_sampling",
    "kl_cov",
    "largest_covariances",
    "ppo_clip",
    "reinforce",
    "sapo",
    "topr",
]
