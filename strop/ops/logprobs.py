"""Log-probabilities of given tokens: from logits, or straight from hidden states and the head's weight."""

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_TOKENS = 256  # rows of logits held at once by linear_logprobs


class LinearLogprobs(NamedTuple):
    """Log-probabilities [T] of the targets and, if asked for, entropies [T] of the whole distribution."""

    logprobs: Tensor
    entropy: Tensor | None


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}. Greedy choice has no log-probability.")


def token_logprobs(logits: Tensor, targets: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probability of each target under softmax(logits / temperature).

        logprob_t = z_t[target_t] - logsumexp(z_t),    z = logits / temperature

    Args:
        logits: E* x V; carries gradient.
        targets: E*, int64 ids below V.
        temperature: > 0.

    Returns:
        E*, at least float32.

    Raises:
        ValueError: shapes do not fit, or temperature <= 0.

    >>> logits = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]]).log()
    >>> [round(x, 4) for x in token_logprobs(logits, torch.tensor([0, 2])).exp().tolist()]
    [0.7, 0.3]
    """
    _check_temperature(temperature)
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits must be targets' shape x V, got {tuple(logits.shape)} for {tuple(targets.shape)}.")
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(-1)


def logits_entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of softmax(logits / temperature): H = logsumexp(z) - sum_v p_v z_v.

    Args: logits E* x V (carries gradient), temperature > 0. Returns E*, at least float32. Raises ValueError for a
    temperature <= 0.

    >>> round(logits_entropy(torch.zeros(4)).item(), 4)
    1.3863
    """
    _check_temperature(temperature)
    log_p = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)


def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, with_entropy: bool = False
) -> LinearLogprobs:
    """`token_logprobs` and entropy of `hidden @ weight.T`, in chunks that never hold all logits of a batch.

        z = hidden weight^T / temperature
        logprob_t = z_t[target_t] - logsumexp(z_t)
        entropy_t = logsumexp(z_t) - sum_v p_tv z_tv

    The backward pass computes each chunk's logits again: memory is O(chunk x V) instead of O(T x V), for one more
    matrix product.

    Args:
        hidden: T x H; carries gradient.
        weight: V x H, the language-model head; carries gradient.
        targets: T, int64 ids below V.
        temperature: > 0.
        with_entropy: return entropies too, with gradient.

    Returns:
        LinearLogprobs: logprobs T, and entropy T or None; at least float32.

    Raises:
        ValueError: shapes do not fit, or temperature <= 0.

    >>> hidden, weight = torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> [round(x, 4) for x in linear_logprobs(hidden, weight, torch.tensor([0, 0])).logprobs.tolist()]
    [-0.3133, -1.3133]
    """
    _check_temperature(temperature)
    if (
        hidden.dim() != 2
        or weight.dim() != 2
        or hidden.shape[1] != weight.shape[1]
        or targets.shape != hidden.shape[:1]
    ):
        raise ValueError(
            "hidden must be T x H, weight V x H and targets T, got "
            f"{tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(targets.shape)}."
        )
    logprobs, entropy = _LinearLogprobs.apply(hidden, weight, targets, temperature, with_entropy)
    return LinearLogprobs(logprobs, entropy if with_entropy else None)


def _chunk_log_softmax(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = hidden @ weight.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.div_(temperature).log_softmax(-1)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, with_entropy):
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(targets.shape, dtype=dtype, device=hidden.device)
        entropy = torch.empty_like(logprobs) if with_entropy else logprobs.new_zeros(())
        for start in range(0, targets.numel(), CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            log_p = _chunk_log_softmax(hidden[part], weight, temperature)
            logprobs[part] = log_p.gather(-1, targets[part, None]).squeeze(-1)
            if with_entropy:
                entropy[part] = -(log_p.exp() * log_p).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # None for an entropy that is only looked at: its share is then left out
        return logprobs, entropy

    @staticmethod
    def backward(ctx, *grad_outputs):
        grad_logprobs, grad_entropy = grad_outputs
        hidden, weight, targets, entropy = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = entropy.new_zeros(targets.shape)
        grad_hidden = torch.empty_like(hidden)
        # Summed over chunks in float32: in bfloat16 the sum drowns (10 % off after 200 chunks).
        grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for start in range(0, targets.numel(), CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            log_p = _chunk_log_softmax(hidden[part], weight, ctx.temperature)
            p = log_p.exp()
            # d logprob_t / d z_v = [v = target] - p_v;    d entropy / d z_v = -p_v (log p_v + entropy)
            grad = p * -grad_logprobs[part, None]
            if grad_entropy is not None:
                grad -= p * (log_p + entropy[part, None]) * grad_entropy[part, None]
            grad.scatter_add_(-1, targets[part, None], grad_logprobs[part, None])
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            if grad_weight.dtype == weight.dtype:
                grad_weight.addmm_(grad.T, hidden[part])
            else:
                grad_weight += grad.T @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None
