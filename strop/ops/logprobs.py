"""Log-probabilities of given tokens: from logits, or straight from hidden states and the head's weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from strop.ops.vocabulary import SUMMARY_SIZE, VocabularyPart, add_at, log_softmax_, merged, outcome, summary
from strop.products import linear

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CHUNK_TOKENS, CHUNK_IDS = 1024, 4096  # rows and columns of logits held at once by linear_logprobs


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
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    group: ProcessGroup | None = None,
) -> LinearLogprobs:
    """`token_logprobs` and entropy of `hidden @ weight.T + bias`, in chunks that never hold all logits of a batch.

        z = (hidden weight^T + bias) / temperature
        logprob_t = z_t[target_t] - logsumexp(z_t)
        entropy_t = logsumexp(z_t) - sum_v p_tv z_tv

    The backward pass computes each chunk's logits again: memory is that of 1024 x 4096 logits instead of T x V, for one more
    matrix product.

    With a group the vocabulary is split over its ranks: each has some rows of the head, those of rank 0 the first, and all have
    the same hidden states and targets. A rank computes its own columns of the logits alone; ranks exchange four numbers
    a token forward, and the gradient of the hidden states backward. All must go backward, with the same gradients.

    Args:
        hidden: T x H; carries gradient, with a group the sum of what all ranks have.
        weight: V x H, the language-model head, or this rank's rows of it, as few as none; carries gradient.
        targets: T, int64 ids below V, with a group below that of all ranks together.
        bias: V, finite, or this rank's part; carries gradient.
        temperature: > 0.
        with_entropy: return entropies too, with gradient.
        group: ranks of torch.distributed that the vocabulary is split over; None: it is not.

    Returns:
        LinearLogprobs: logprobs T, and entropy T or None; at least float32. All ranks of a group have the same.

    Raises:
        ValueError: shapes do not fit, temperature <= 0, or a target that is no id.

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
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have an entry for each of weight's {len(weight)} rows, got {tuple(bias.shape)}.")
    part = VocabularyPart.of(weight, targets, group)
    logprobs, entropy = _LinearLogprobs.apply(hidden, weight, bias, targets, temperature, with_entropy, part)
    return LinearLogprobs(logprobs, entropy if with_entropy else None)


def _chunks(size: int, most: int) -> list[slice]:
    """At least one, which may be empty."""
    return [slice(start, min(start + most, size)) for start in range(0, max(size, 1), most)]


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, with_entropy, vocabulary):
        head = _Head(weight, bias, temperature)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        mine = torch.empty(len(targets), SUMMARY_SIZE, dtype=dtype, device=hidden.device)
        for tokens in _chunks(len(targets), CHUNK_TOKENS):
            columns = vocabulary.columns(targets[tokens])
            found = []
            for ids in _chunks(len(weight), CHUNK_IDS):
                found.append(summary(head.logits(hidden[tokens], ids), columns - ids.start, with_entropy=with_entropy))
            mine[tokens] = merged(found)
        logprobs, entropy, normalizer = outcome(vocabulary.gathered(mine))
        if not with_entropy:
            entropy = logprobs.new_zeros(())
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, normalizer)
        ctx.temperature, ctx.vocabulary = temperature, vocabulary
        ctx.set_materialize_grads(False)  # None for an entropy that is only looked at: its share is then left out
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_logprobs, grad_entropy = grad_outputs
        hidden, weight, bias, targets, entropy, normalizer = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if grad_logprobs is None:
            grad_logprobs = entropy.new_zeros(targets.shape)
        head, grad_logprobs = _Head(weight, bias, ctx.temperature), grad_logprobs / ctx.temperature
        # Summed over chunks in float32: in bfloat16 the sum drowns (10 % off after 200 chunks). So are sums over ranks.
        wide = torch.promote_types(weight.dtype, torch.float32)
        of_hidden = torch.zeros_like(hidden, dtype=wide) if needs_hidden else None
        of_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        of_bias = torch.zeros(len(weight), dtype=wide, device=weight.device) if needs_bias else None
        for tokens in _chunks(len(targets), CHUNK_TOKENS):
            columns = ctx.vocabulary.columns(targets[tokens])
            for ids in _chunks(len(weight), CHUNK_IDS):
                log_p = log_softmax_(head.logits(hidden[tokens], ids), normalizer[tokens])
                # d logprob_t / d z_v = [v = target] - p_v;    d entropy / d z_v = -p_v (log p_v + entropy)
                if grad_entropy is None:
                    grad = log_p.exp_().mul_(-grad_logprobs[tokens, None])
                else:
                    share = (log_p + entropy[tokens, None]).mul_(grad_entropy[tokens, None] / ctx.temperature)
                    grad = share.add_(grad_logprobs[tokens, None]).mul_(log_p.exp_()).neg_()
                add_at(grad, columns - ids.start, grad_logprobs[tokens])
                if of_bias is not None:
                    of_bias[ids] += grad.sum(0)
                grad = grad.to(hidden.dtype)
                if of_hidden is not None:
                    of_hidden[tokens] += linear(grad, weight[ids].T)
                if of_weight is not None:
                    of_weight[ids] += linear(grad.T, hidden[tokens].T)
        if of_hidden is not None:
            ctx.vocabulary.add_up(of_hidden)
        return (
            None if of_hidden is None else of_hidden.to(hidden.dtype),
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(weight.dtype),
            *(None,) * 4,
        )


class _Head(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    temperature: float

    def logits(self, hidden: Tensor, ids: slice) -> Tensor:
        """Those of some ids, scaled, at least float32; the caller's to change."""
        logits = linear(hidden, self.weight[ids], None if self.bias is None else self.bias[ids])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if self.temperature == 1 else logits.div_(self.temperature)
