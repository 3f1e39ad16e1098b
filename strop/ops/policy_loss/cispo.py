"""CISPO: the importance weight is clipped, the gradient is not."""

from torch import Tensor

from strop.ops.policy_loss.ratio import TokenLoss, checked, checked_band, clamped_log_ratio


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, eps_clip: float, eps_clip_high: float
) -> TokenLoss:
    """CISPO: REINFORCE whose importance weight is clipped under a stop-gradient, so every token keeps its gradient.

    With r = exp(logprobs - old_logprobs), A = advantages and w = clip(r, 1 - eps_clip, 1 + eps_clip_high), held
    constant:

        loss = -w A logprobs            gradient by logprobs = -w A

    Source: MiniMax-M1 (arXiv:2506.13585) eq. 4 and 5. The canonical form has no lower bound: eps_clip = 1 makes it 0.
    Departure: (1) log-ratios are clamped to +-20 before the exponential.

    Args:
        logprobs: E*, of the policy now; carries gradient, but none flows through r.
        old_logprobs: E*, of the policy before this step.
        advantages: E*.
        eps_clip: distance of the lower bound from 1, >= 0; 1 or more means no lower bound.
        eps_clip_high: distance of the upper bound from 1, >= 0.

    Returns:
        TokenLoss: `clipped` is true where the weight was cut.

    Raises:
        ValueError: shapes differ or a bound is negative.

    >>> import torch
    >>> ratio = torch.tensor([1.0, 1.14, 1.56, 0.4])
    >>> logprobs = torch.tensor([-0.7, -1.2, -0.4, -2.1])
    >>> A = torch.tensor([1.0, -0.5, 2.0, -1.0])
    >>> loss, clipped = cispo(logprobs, logprobs - ratio.log(), A, eps_clip=0.2, eps_clip_high=0.28)
    >>> [round(x, 4) for x in loss.tolist()], clipped.tolist()
    ([0.7, -0.684, 1.024, -1.68], [False, False, True, True])
    """
    high = checked_band(eps_clip, eps_clip_high)
    logprobs, old_logprobs, advantages = checked(logprobs, old_logprobs, advantages)
    ratio = clamped_log_ratio(logprobs, old_logprobs).exp().detach()
    weight = ratio.clamp(max(0.0, 1 - eps_clip), 1 + high)
    return TokenLoss(-weight * advantages * logprobs, weight != ratio)
