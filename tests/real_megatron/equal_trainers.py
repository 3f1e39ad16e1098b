"""The trainer megatron beside the trainer torch: the same model, options and batches."""

from contextlib import contextmanager
from unittest.mock import patch

import rank_processes
import torch
from safetensors.torch import load
from trainers.made_batches import saved_state
from trainers.test_several_processes import check_equal, check_same_weights, objective_of, rows

from strop.config import MegatronTrainerOptions, TorchTrainerOptions
from strop.runtime import ranks as of_rank_0
from strop.runtime.learning import prepare_update
from strop.trainers import TorchTrainer
from strop.trainers.megatron import MegatronTrainer

# AdamW makes steps of the learning rate of gradients however small, also of those that are 0 but for rounding, as keys' biases
# have; with a larger epsilon it does not. Micro-batches of 30 positions: several in a step, of unlike lengths.
GIVEN = {"lr": 1e-3, "adam_eps": 1e-3, "max_tokens_per_micro_batch": 30, "weight_decay": 0.1, "max_grad_norm": 0.5}


class Pairs:
    """Makes both trainers over the ranks of one layout."""

    def __init__(self, ranks, layout):
        self.ranks, self.layout = ranks, layout

    def megatron(self, build, *, keeps_reference=False, here=None, **given):
        options = MegatronTrainerOptions(**self.layout, **GIVEN | given)
        more = {"total_steps": 9, "keeps_reference": keeps_reference}
        return self.ranks.make(MegatronTrainer, build(), options, here=here, **more)

    def torch(self, build, *, keeps_reference=False, **given):
        options = TorchTrainerOptions(layout="padded", **GIVEN | given)
        return TorchTrainer(build(), options, total_steps=9, keeps_reference=keeps_reference)

    def both(self, build, **given):
        return self.torch(build, **given), self.megatron(build, **given)


@contextmanager
def opened(layout, *, process_timeout_s=60.0):
    torch.set_num_threads(1)
    options = MegatronTrainerOptions(**layout, process_timeout_s=process_timeout_s)
    start = patch.object(of_rank_0, "start_process", rank_processes.start)
    with start, of_rank_0.open_ranks(options, device=torch.device("cpu")) as ranks:
        yield Pairs(ranks, layout)


def batch_of(step, objective):
    return prepare_update(objective, rows(step), updates_done=1)


def steps(trainer, first, last):
    objective = objective_of(entropy_coef=0.01)
    for step in range(first, last):
        trainer.step(batch_of(step, objective), objective)


def check_steps(one, many, *, num_steps=5):
    """Losses, norms of gradients and all other metrics of each step, and weights and log-probabilities after them."""
    objective = objective_of(entropy_coef=0.01)
    for step in range(num_steps):
        batch = batch_of(step, objective)
        check_equal(many.step(batch, objective), one.step(batch, objective))
    check_same_weights(one, many)
    check_logprobs(one, many)
    for found, wanted in zip(many.token_losses(rows(3), objective), one.token_losses(rows(3), objective), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def check_gradients(one, many, folder):
    """AdamW's moments after one step, of each weight: a tenth of its gradient, and a twentieth of the square."""
    steps(one, 0, 1)
    steps(many, 0, 1)
    found, wanted = (saved_state(trainer, folder / name) for name, trainer in (("many", many), ("one", one)))
    found, wanted = (load(files["optimizer.safetensors"]) for files in (found, wanted))
    assert found.keys() == wanted.keys()
    for name, moment in wanted.items():
        torch.testing.assert_close(
            found[name], moment, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def check_logprobs(one, many, **more):
    torch.testing.assert_close(many.logprobs(rows(9), **more), one.logprobs(rows(9), **more), rtol=1e-5, atol=1e-5)


def bits(model):
    """The weights as whole numbers, so that -0 differs from 0."""
    return {name: p.detach().float().clone().view(torch.int32) for name, p in model.named_parameters()}


def check_comes_back(pairs, build):
    """Weights go into the layers of Megatron-Core and come back bit for bit: among them -0, and the smallest numbers."""

    def with_odd_bits():
        model = build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.view(-1)[::3] = -0.0
                parameter.view(-1)[1::5] = 1e-45
        return model

    many = pairs.megatron(with_odd_bits)
    with torch.no_grad():
        for parameter in many.model.parameters():
            parameter.fill_(7.0)
    many.publish()
    found, wanted = bits(many.model), bits(with_odd_bits())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
