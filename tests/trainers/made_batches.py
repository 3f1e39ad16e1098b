"""Batches of a few tokens for the trainer, and what a step did with them."""

from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from strop import ops
from strop.algorithms import PolicyObjective
from strop.config import AlgorithmOptions, CriticOptions, TorchTrainerOptions
from strop.data import build_batch
from strop.trainers import TorchCritic, TorchTrainer, ValueModel, body_of
from strop.types import Prompt, Rollout


def make_rollout(prompt, response, *, row=0, sample=0, finish_reason="stop", reward=None, logprobs=None):
    prompt, response = tuple(prompt), tuple(response)
    return Rollout(
        prompt=Prompt(row=row, tokens=prompt, text=""),
        group_id=row,
        sample=sample,
        tokens=prompt + response,
        response_mask=(False,) * len(prompt) + (True,) * len(response),
        rollout_logprobs=(0.0,) * len(prompt) + tuple(logprobs or (0.0,) * len(response)),
        policy_versions=(-1,) * len(prompt) + (0,) * len(response),
        finish_reason=finish_reason,
        text="",
        reward=reward,
    )


def make_batch(*rows, advantages=None, reduction="token_mean", max_response_tokens=None):
    """A batch of (prompt, response) rows, sequence i named "sample 0 of prompt row i", with the step's token weights."""
    rollouts = [make_rollout(prompt, response, row=i) for i, (prompt, response) in enumerate(rows)]
    batch = build_batch(rollouts, [1.0] * len(rows) if advantages is None else advantages)
    return weighted(batch, reduction=reduction, max_response_tokens=max_response_tokens)


def weighted(batch, *, reduction="token_mean", max_response_tokens=None):
    """The batch as one optimizer step."""
    weights = ops.token_weights(
        batch.loss_mask,
        batch.sequence_ids,
        reduction=reduction,
        group_ids=batch.group_ids if reduction == "prompt_mean" else None,
        max_response_tokens=max_response_tokens,
    )
    return replace(batch, token_weights=weights)


def random_rows(seed, *, vocab, count=7, longest=9):
    """Prompts of 1 to 4 tokens and responses of 1 to `longest`."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(low, high, size):
        return torch.randint(low, high, (size,), generator=generator).tolist()

    sizes = zip(numbers(1, 5, count), numbers(1, longest + 1, count), strict=True)
    return [(numbers(0, vocab, before), numbers(0, vocab, after)) for before, after in sizes]


def make_trainer(model, *, total_steps=100, max_logprob_gap=float("inf"), keeps_reference=False, **options):
    """A trainer that never scales gradients unless told to."""
    options = {"max_grad_norm": 1e9} | options
    return TorchTrainer(
        model,
        TorchTrainerOptions(**options),
        total_steps=total_steps,
        max_logprob_gap=max_logprob_gap,
        keeps_reference=keeps_reference,
    )


def make_critic(
    model,
    *,
    total_steps=100,
    layout="padded",
    max_tokens_per_micro_batch=4096,
    activation_checkpointing=False,
    **options,
):
    """A critic on a copy of the model's body, one that never scales gradients unless told to."""
    rows = TorchTrainerOptions(
        layout=layout,
        max_tokens_per_micro_batch=max_tokens_per_micro_batch,
        activation_checkpointing=activation_checkpointing,
    )
    options = CriticOptions(**{"max_grad_norm": 1e9} | options)
    return TorchCritic(ValueModel(body_of(model)), options, rows, total_steps=total_steps)


def make_objective(*, temperature=1.0, **algorithm):
    options = AlgorithmOptions.model_validate(algorithm)
    return PolicyObjective(options, temperature=temperature, max_response_tokens=8)


class GivenLosses:
    """An objective whose loss of a token is the number in its `advantages` slot, with gradient 1 by logprobs x that."""

    uses_reference = False
    uses_entropy = measures_entropy = False
    temperature = 1.0

    def loss(self, tokens):
        graph = tokens.logprobs * tokens.advantages
        return tokens.advantages + graph - graph.detach(), {}


@contextmanager
def seen_gradients(model):
    """A dict that holds, after a step inside the block, the gradients that the optimizer was handed."""
    found = {}

    def remember(*_):
        found.update({n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None})

    hook = register_optimizer_step_pre_hook(remember)
    try:
        yield found
    finally:
        hook.remove()


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def masters(learner):
    """Copies of what the optimizer moves: float32, whatever type the model has."""
    return {name: p.detach().clone() for name, p in learner._updates.parameters.items()}


def same_tensors(a, b):
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def saved_state(trainer, folder):
    """All that a trainer holds, as the bytes that it would write: weights, moments, step count."""
    folder.mkdir()
    trainer.save(folder)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
