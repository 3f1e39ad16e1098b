"""Policy losses: each maps per-token tensors of one shape E* to an unreduced loss of that shape.

How losses are averaged is not decided here: the caller multiplies by token weights (`strop.ops.token_weights`) and
sums. Masked tokens are to be selected out before the call.
"""

from strop.ops.policy_loss.cispo import cispo
from strop.ops.policy_loss.ppo import dual_clipped, ppo_clip
from strop.ops.policy_loss.ratio import MAX_LOG_RATIO, TokenLoss

__all__ = ["MAX_LOG_RATIO", "TokenLoss", "cispo", "dual_clipped", "ppo_clip"]
