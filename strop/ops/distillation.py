"""A teacher's signal on the student's own samples: per token, how far the student is from the teacher."""

import torch
from torch import Tensor

from strop.ops.advantages.returns import discounted_returns


def distillation_advantages(
    old_logprobs: Tensor,
    teacher_logprobs: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    *,
    coef: float,
    gamma: float,
) -> Tensor:
    """The advantage that a teacher gives each token of the student's own samples.

        d_t = teacher_logprobs_t - old_logprobs_t
        A_t = coef (sum over trainable s >= t of gamma^(s - t) d_s)

    -d_t is the k1 estimate of the reverse KL, KL(student || teacher), of token t: its mean over the student's samples is the
    KL. With gamma = 0 a token answers for its own distance alone, the on-policy distillation of Thinking Machines (2025,
    "On-Policy Distillation") and, in expectation, the gradient of GKD with the reverse KL on the student's samples (Agarwal
    et al. 2023, arXiv:2306.13649, eq. 5). With gamma = 1 a token answers for all that follows it: the gradient of the reverse
    KL of whole responses of MiniLLM (Gu et al. 2023, arXiv:2306.08543, eq. 2). Departures from the latter: no length
    normalisation, no teacher-mixed sampling.

    Args:
        old_logprobs: T, of the policy that sampled; no gradient.
        teacher_logprobs: T, of the teacher at the same temperature. What stands in masked slots is never read.
        loss_mask: T, bool; masked tokens are not steps.
        sequence_ids: T, int, the tokens of a sequence in their order.
        coef: weight of the signal, in advantage per nat.
        gamma: discount of later tokens' distances, in [0, 1].

    Returns:
        T, in at least float32; exactly 0 where masked.

    Raises:
        ValueError: shapes differ, or gamma is out of range.

    >>> old, teacher = torch.tensor([-1.0, -2.0, -9.0, -1.0]), torch.tensor([-1.5, -1.0, 0.0, -1.0])
    >>> mask, ids = torch.tensor([True, True, False, True]), torch.zeros(4, dtype=torch.int64)
    >>> distillation_advantages(old, teacher, mask, ids, coef=2.0, gamma=0.0).tolist()
    [-1.0, 2.0, 0.0, 0.0]
    """
    if old_logprobs.shape != teacher_logprobs.shape:
        raise ValueError(
            f"old_logprobs and teacher_logprobs must share a shape, got {tuple(old_logprobs.shape)} and "
            f"{tuple(teacher_logprobs.shape)}."
        )
    wide = torch.promote_types(torch.promote_types(old_logprobs.dtype, teacher_logprobs.dtype), torch.float32)
    distance = teacher_logprobs.to(wide) - old_logprobs.to(wide)
    return coef * discounted_returns(distance, loss_mask, sequence_ids, gamma=gamma).to(wide)
