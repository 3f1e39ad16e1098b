"""What the conformance suite is made over, and how one case is run: every case goes through the config, the real objective and
the trainer's real step. Cases are generated: whatever is registered in `POLICY_LOSSES` or `CORRECTIONS` is in the suite.
"""

import itertools
import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Literal, get_args, get_origin

import tiny_models
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from strop.algorithms import CORRECTIONS, POLICY_LOSSES, PolicyObjective
from strop.config import AlgorithmOptions, TrainConfig, make_config
from strop.data import build_batch
from strop.runtime.learning import prepare_update
from strop.trainers import TorchTrainer
from strop.types import ConfigError, Prompt, Rollout

VOCAB, TEMPERATURE, LONGEST_RESPONSE = 20, 0.9, 12
REDUCTIONS = get_args(AlgorithmOptions.model_fields["reduction"].annotation)
WHOLE, ALONE, UNEVEN = 100_000, 1, 23  # max_tokens_per_micro_batch: all in one, one sequence each, parts of 1 to 4

# Beside the defaults, for losses whose defaults single out one token of a batch this small or leave a branch unused. A
# loss that is not named here runs with its defaults.
SETTINGS = {
    "ppo_clip": {"eps_clip_c": 3.0},
    "clip_cov": {"cov_fraction": 0.2, "cov_low": 0.1},
    "kl_cov": {"cov_fraction": 0.2},
}


# ---- cases ----------------------------------------------------------------------------------------------------------


def variants(kind, options_class):
    """The table of this kind, once for each combination of the words that it can be given."""
    words = {name: _words(field) for name, field in options_class.model_fields.items() if name != "kind"}
    words = {name: choices for name, choices in words.items() if choices}
    for choice in itertools.product(*words.values()):
        yield {"kind": kind, **SETTINGS.get(kind, {}), **dict(zip(words, choice, strict=True))}


def _words(field):
    if field.annotation is bool:
        return (False, True)
    return get_args(field.annotation) if get_origin(field.annotation) is Literal else ()


def losses():
    """Every registered policy loss, in every variant: name -> table."""
    found = {}
    for kind, binding in POLICY_LOSSES.items():
        for index, table in enumerate(variants(kind, binding.options)):
            found[kind if index == 0 else f"{kind}-{'-'.join(map(str, list(table.values())[1:]))}"] = table
    return found


def corrections():
    """Every registered correction, in every variant: name -> table. The first of each kind comes with every reduction."""
    return {
        "-".join(str(value) for value in table.values()): table
        for kind, binding in CORRECTIONS.items()
        for table in variants(kind, binding.options)
    }


LOSSES, CORRECTION_TABLES = losses(), corrections()
# What else [algorithm] puts into the loss, together: KL to a reference, entropy, sequences that are left out.
BESIDE = {
    "kl": {"kl": {"coef": 0.1, "kind": "k3"}},
    "everything": {
        "kl": {"coef": 0.1, "kind": "k3", "unbiased": True},
        "entropy_coef": 0.02,
        "veto_ratio": 0.15,
        "opsm_delta": 1e-4,
    },
}


def config_of(algorithm, *, max_response_tokens=LONGEST_RESPONSE):
    """Two updates a batch, so that ratios differ from 1 and no bound is refused as idle."""
    values = {
        "model": {"path": "m"},
        "data": {"kind": "jsonl", "path": "d"},
        "reward": {"kind": "exact"},
        "rollout": {
            "prompts_per_step": 4,
            "group_size": 3,
            "max_response_tokens": max_response_tokens,
            "temperature": TEMPERATURE,
        },
        "algorithm": {"updates_per_batch": 2} | algorithm,
    }
    return make_config(TrainConfig, values, {}, file="run.toml")


def composes(algorithm):
    """False where the config refuses the combination."""
    try:
        config_of(algorithm)
    except ConfigError:
        return False
    return True


def _cases():
    first_of_kind = {}
    for name, table in CORRECTION_TABLES.items():
        first_of_kind.setdefault(table["kind"], name)
    for (loss, table), reduction in itertools.product(LOSSES.items(), REDUCTIONS):
        base = {"policy_loss": table, "reduction": reduction}
        yield f"{loss}-{reduction}", base
        for name, correction in CORRECTION_TABLES.items():
            if reduction == REDUCTIONS[0] or name == first_of_kind[correction["kind"]]:
                yield f"{loss}-{reduction}-{name}", base | {"correction": correction}
    for loss, table in LOSSES.items():
        yield from ((f"{loss}-{name}", {"policy_loss": table, **beside}) for name, beside in BESIDE.items())


CASES = {name: algorithm for name, algorithm in _cases() if composes(algorithm)}


# ---- the batch ------------------------------------------------------------------------------------------------------

# group, advantage, prompt tokens, response: t = trainable, . = a tool's tokens, never trained on
ROWS = (
    (0, 1.3, 3, "ttttt"),
    (0, -0.8, 3, "tt...ttt"),
    (0, 0.4, 3, "t"),
    (1, -1.6, 1, "ttt..tt.tttt"),
    (1, 0.9, 1, "tttttttt"),
    (2, 1.1, 4, ".ttt.t"),
    (2, -1.2, 4, "tttttt"),
    (2, -0.5, 4, "...."),  # nothing to learn from
    (3, 0.7, 2, "tttt"),
    (3, -0.9, 2, "t.t"),
)
UNTRAINABLE = 7
SHUFFLED = (6, 2, 9, 0, 7, 4, 8, 3, 1, 5)
ONE_TOKEN_ROWS = tuple((group, advantage, prompt, ".t") for group, advantage, prompt, _ in ROWS)
EQUAL_ROWS = tuple((i // 2, (-1) ** i * (0.5 + 0.2 * i), 1 + i % 3, "ttt") for i in range(8))
OFFSETS = (
    0.06,
    -0.1,
    2.1,
    -2.2,
    0.7,
    -0.6,
    0.02,
    -1.4,
    1.5,
)  # log-ratios: inside, just outside and far outside of bands


def llama(dtype=torch.float32):
    return tiny_models.llama(vocab_size=VOCAB).to(dtype)


def plain_logprobs(model, batch):
    """Log-probabilities [T] of trainable tokens, 0 elsewhere, by transformers and torch alone; with gradient."""
    found = []
    for start, length in zip(batch.starts, batch.lengths, strict=True):
        tokens, mask = batch.tokens[start : start + length], batch.loss_mask[start : start + length]
        table = (model(input_ids=tokens[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        own = table[:-1].gather(1, tokens[1:, None])[:, 0]
        found.append(torch.cat([own.new_zeros(1), torch.where(mask[1:], own, 0.0)]))
    return torch.cat(found)


@cache
def made_batch(rows=ROWS):
    """The rows with log-probabilities around those of the model: spread over both sides of every band."""
    generator = torch.Generator().manual_seed(5)
    rollouts = []
    for index, (group, _, before, response) in enumerate(rows):
        tokens = tuple(torch.randint(VOCAB, (before + len(response),), generator=generator).tolist())
        mask = (False,) * before + tuple(c == "t" for c in response)
        rollouts.append(
            Rollout(
                prompt=Prompt(row=group, tokens=tokens[:before], text=""),
                group_id=group,
                sample=index,
                tokens=tokens,
                response_mask=mask,
                rollout_logprobs=(0.0,) * len(tokens),
                policy_versions=(-1,) * len(tokens),
                finish_reason="stop",
                text="",
            )
        )
    batch = build_batch(rollouts, [advantage for _, advantage, _, _ in rows])
    with torch.no_grad():
        current = plain_logprobs(llama(), batch)
    # One bag of offsets a sign of the advantage, so that each sign meets each of them.
    log_ratio = torch.zeros(current.shape)
    for sign in (batch.advantages > 0, batch.advantages <= 0):
        places = (sign & batch.loss_mask).nonzero()[:, 0]
        log_ratio[places] = torch.tensor(OFFSETS).repeat(len(places) // len(OFFSETS) + 1)[: len(places)]
    noise = torch.randn(3, *current.shape, generator=generator)
    old = (current - log_ratio - 0.01 * noise[0]).clamp(max=-1e-3)
    return replace(
        batch,
        old_logprobs=torch.where(batch.loss_mask, old, 0.0),
        rollout_logprobs=torch.where(batch.loss_mask, old - noise[1], 0.0).clamp(max=0.0),
        ref_logprobs=torch.where(batch.loss_mask, current + 0.5 * noise[2], 0.0),
    )


def prepared(batch, objective, *, updates_done=1):
    """The batch as one optimizer step, as the loop prepares it: a later update of its rollouts unless told otherwise, so
    that ratios are those to the batch's old_logprobs."""
    return prepare_update(objective, batch, updates_done=updates_done)


def planted(batch, values):
    """The batch with these values in turn in every masked slot that a formula could read."""
    masked = ~batch.loss_mask
    filling = torch.tensor(values).repeat(int(masked.sum()))[: int(masked.sum())]

    def filled(tensor):
        tensor = tensor.clone()
        tensor[masked] = filling
        return tensor

    names = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages")
    return replace(batch, **{name: filled(getattr(batch, name)) for name in names})


# ---- running --------------------------------------------------------------------------------------------------------


def make_objective(algorithm, **config):
    options = config_of(algorithm, **config)
    return PolicyObjective(
        options.algorithm,
        temperature=options.rollout.temperature,
        max_response_tokens=options.rollout.max_response_tokens,
    )


@cache
def objective_of(name):
    return make_objective(CASES[name])


@cache
def trainer_of(layout="padded", budget=WHOLE):
    """One trainer serves all cases: its rate is too small to move a float32 weight, its bound too high to scale."""
    trainer = TrainConfig.model_fields["trainer"].default.model_copy(
        update={"lr": 1e-30, "max_grad_norm": 1e30, "layout": layout, "max_tokens_per_micro_batch": budget}
    )  # model_copy: left_padded is a layout of the trainer that no config offers
    return TorchTrainer(llama(), trainer, total_steps=10**9)


def stepped(batch, objective, *, layout="padded", budget=WHOLE):
    """One real step: metrics, and the gradients that the optimizer was handed (none where no step was made)."""
    trainer, gradients = trainer_of(layout, budget), {}

    def remember(*_):
        gradients.update({name: p.grad.detach().clone() for name, p in trainer.model.named_parameters()})

    hook = register_optimizer_step_pre_hook(remember)
    try:
        metrics = trainer.step(batch, objective)
    finally:
        hook.remove()
    return {name: metric.value for name, metric in metrics.items() if name != "padding_share"}, gradients


def run(name, *, order=None, plant=None, **trainer):
    """A case of the suite on the made batch, its rows in this order."""
    batch = made_batch() if order is None else made_batch().select(order)
    batch = batch if plant is None else planted(batch, plant)
    return stepped(prepared(batch, objective_of(name)), objective_of(name), **trainer)


@cache
def whole(name):
    """The whole batch in one padded micro-batch: what every other way of running a case is compared with."""
    return run(name)


# ---- comparing ------------------------------------------------------------------------------------------------------

# float32 has 6e-8 of relative rounding, and a gradient here is a sum of some tens of terms that partly cancel, added up in
# another order: some 1e-7 to 1e-6. A lost denominator, a token too many or a wrong neighbour moves it by 1e-2 and more.
RELATIVE = 1e-5


def check_gradients(found, wanted):
    """Equal relative to the largest entry of each parameter; entries far below it are sums that cancel."""
    assert found.keys() == wanted.keys()
    assert any(gradient.abs().max() > 1e-3 for gradient in wanted.values()), "no gradient: nothing was compared"
    for name, gradient in wanted.items():
        difference, size = (found[name] - gradient).abs().max(), gradient.abs().max()
        assert difference <= RELATIVE * size, f"{name}: {difference:.3g} of {size:.3g}"


def check_numbers(found, wanted):
    """Loss and metrics equal. The absolute part is for sums that cancel: losses of a token are of order 1."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert math.isclose(found[name], value, rel_tol=RELATIVE, abs_tol=2e-6), f"{name}: {found[name]} != {value}"


def check_same(found, wanted):
    check_gradients(found[1], wanted[1])
    check_numbers(found[0], wanted[0])


def check_identical(found, wanted):
    """Bit for bit."""
    assert found[0] == wanted[0]
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        assert torch.equal(found[1][name], gradient), name
    assert any(gradient.abs().max() > 1e-3 for gradient in wanted[1].values()), "no gradient: nothing was compared"


def check_cut(name, budget):
    """The size of micro-batches does not matter."""
    check_same(run(name, budget=budget), whole(name))


def check_order(name):
    """Neither does the order of the sequences, groups torn apart."""
    check_same(run(name, order=SHUFFLED, budget=UNEVEN), whole(name))


def check_layout(name, layout, budget):
    """Nor how they are laid out."""
    check_same(run(name, layout=layout, budget=budget), whole(name))


def check_masked_slots(name, values):
    """What is in masked slots reaches nothing."""
    check_identical(run(name, plant=values), whole(name))


# ---- references by transformers and torch alone ---------------------------------------------------------------------


def plain_weights(batch, reduction, max_response_tokens=LONGEST_RESPONSE):
    """Token weights by counting, in Python."""
    rows = list(zip(batch.loss_mask.tolist(), batch.sequence_ids.tolist(), batch.group_ids.tolist(), strict=True))
    trained = [(sequence, group) for mask, sequence, group in rows if mask]
    num_sequences, num_groups = len({s for s, _ in trained}), len({g for _, g in trained})

    def weight(sequence, group):
        if reduction == "token_mean":
            return 1 / len(trained)
        if reduction == "sequence_mean":
            return 1 / num_sequences / sum(s == sequence for s, _ in trained)
        if reduction == "prompt_mean":
            return 1 / num_groups / sum(g == group for _, g in trained)
        assert reduction == "constant_length", f"{reduction}: say here how it weighs a token"
        return 1 / num_sequences / max_response_tokens

    return torch.tensor([weight(s, g) if mask else 0.0 for mask, s, g in rows], dtype=torch.float64)


def plain_gradients(batch, weights, token_loss):
    """Loss and gradients of sum(weights x token_loss(logprobs)), in float64."""
    mask = batch.loss_mask
    model, logprobs = _plain_float64(
        *(tuple(t.tolist()) for t in (batch.tokens, mask)), tuple(batch.starts), tuple(batch.lengths)
    )
    loss = (weights[mask] * token_loss(logprobs[mask])).sum()
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
    return loss.item(), {name: g.float() for name, g in zip(parameters, gradients, strict=True)}


@cache
def _plain_float64(tokens, mask, starts, lengths):
    """A model and its log-probabilities of a batch, which many losses go back through."""
    batch = SimpleNamespace(tokens=torch.tensor(tokens), loss_mask=torch.tensor(mask), starts=starts, lengths=lengths)
    model = llama(torch.float64)
    return model, plain_logprobs(model, batch)
