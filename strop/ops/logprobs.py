"""Log-probabilities of given tokens: from logits, or straight from hidden states and the head's weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from strop.ops.vocabulary import SUMMARY_SIZE, VocabularyPart

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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

    The backward pass computes each chunk's logits again: memory is O(chunk x V) instead of O(T x V), for one more
    matrix product.

    With a group the vocabulary is split over its ranks: each has some rows of the head, those of rank 0 the first, and all have
    the same hidden states and targets. A rank holds its own columns of a chunk's logits alone; ranks exchange four numbers
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
        ValueError: shapes do not fit, temperature <= 0, or with a group a target that is no id.

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
    part = None if group is None else VocabularyPart.of(weight, targets, group)
    logprobs, entropy = _LinearLogprobs.apply(hidden, weight, bias, targets, temperature, with_entropy, part)
    return LinearLogprobs(logprobs, entropy if with_entropy else None)


def _chunks(num_tokens: int) -> Iterator[slice]:
    return (slice(start, start + CHUNK_TOKENS) for start in range(0, num_tokens, CHUNK_TOKENS))


def _chunk_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = hidden @ weight.T if bias is None else torch.addmm(bias, hidden, weight.T)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)


def _chunk_log_p(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, normalizer: Tensor | None = None
) -> Tensor:
    """Log-probabilities of a chunk; its logits are gone."""
    z = _chunk_logits(hidden, weight, bias, temperature)
    return z.log_softmax(-1) if normalizer is None else VocabularyPart.log_softmax(z, normalizer)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, with_entropy, vocabulary):
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        normalizer = None
        if vocabulary is None:
            logprobs = torch.empty(targets.shape, dtype=dtype, device=hidden.device)
            entropy = torch.empty_like(logprobs)
            for part in _chunks(len(targets)):
                log_p = _chunk_log_p(hidden[part], weight, bias, temperature)
                logprobs[part] = log_p.gather(-1, targets[part, None]).squeeze(-1)
                if with_entropy:
                    entropy[part] = -(log_p.exp() * log_p).sum(-1)
        else:
            mine = torch.empty(len(targets), SUMMARY_SIZE, dtype=dtype, device=hidden.device)
            for part in _chunks(len(targets)):
                z = _chunk_logits(hidden[part], weight, bias, temperature)
                mine[part] = vocabulary.summary(z, targets[part], with_entropy=with_entropy)
                del z  # before the next one
            logprobs, entropy, normalizer = vocabulary.combined(mine)
        if not with_entropy:
            entropy = logprobs.new_zeros(())
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, normalizer)
        ctx.temperature, ctx.vocabulary = temperature, vocabulary
        ctx.set_materialize_grads(False)  # None for an entropy that is only looked at: its share is then left out
        return logprobs, entropy

    @staticmethod
    def backward(ctx, *grad_outputs):
        grad_logprobs, grad_entropy = grad_outputs
        hidden, weight, bias, targets, entropy, normalizer = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if grad_logprobs is None:
            grad_logprobs = entropy.new_zeros(targets.shape)
        # Summed over chunks in float32: in bfloat16 the sum drowns (10 % off after 200 chunks). So are sums over ranks.
        wide = torch.promote_types(weight.dtype, torch.float32)
        of_hidden = torch.empty_like(hidden, dtype=hidden.dtype if ctx.vocabulary is None else wide)
        of_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        of_bias = torch.zeros(len(weight), dtype=wide, device=weight.device) if needs_bias else None
        for part in _chunks(len(targets)):
            log_p = _chunk_log_p(
                hidden[part], weight, bias, ctx.temperature, None if normalizer is None else normalizer[part]
            )
            p = log_p.exp()
            # d logprob_t / d z_v = [v = target] - p_v;    d entropy / d z_v = -p_v (log p_v + entropy)
            grad = p * -grad_logprobs[part, None]
            if grad_entropy is not None:
                grad -= p * (log_p + entropy[part, None]) * grad_entropy[part, None]
            if ctx.vocabulary is None:
                grad.scatter_add_(-1, targets[part, None], grad_logprobs[part, None])
            else:
                ctx.vocabulary.add_at(grad, targets[part], grad_logprobs[part])
            grad.div_(ctx.temperature)
            if of_bias is not None:
                of_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            if needs_hidden:
                of_hidden[part] = grad @ weight
            if of_weight is not None:
                _add_product(of_weight, grad.T, hidden[part])
        if needs_hidden and ctx.vocabulary is not None:
            ctx.vocabulary.add_up(of_hidden)
        return (
            of_hidden.to(hidden.dtype) if needs_hidden else None,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(weight.dtype),
            *(None,) * 4,
        )


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
