"""Every option of [algorithm] moves what is learned, or is refused; nothing is accepted and then ignored.

The options, and another value for each, are read off the tree itself, so a new option is tested the day it is added.
A batch goes through the loop's own `weigh` and `learn` into the real trainer; what counts is where the weights
end and the loss of each update. (Where all ratios are 1, PPO and CISPO have one gradient and different losses.)
"""

import contextlib
import copy
import types
from functools import cache
from typing import Literal, get_args, get_origin

import pytest
import tiny_models
import torch

from strop.algorithms import ADVANTAGES, CORRECTIONS, POLICY_LOSSES, PolicyObjective
from strop.config import AlgorithmOptions, TrainConfig, make_config, tree
from strop.runtime.audit.variations import lower_bound
from strop.runtime.learning import learn, weigh
from strop.trainers import TorchTrainer
from strop.types import ConfigError, Metric, Prompt, RewardError, Rollout, merge_metrics

PROMPTS, SAMPLES, VOCAB = 4, 3, 4
ROOT = {
    "model": {"path": "m"},
    "data": {"kind": "jsonl", "path": "d"},
    "reward": {"kind": "exact"},
    "rollout": {"prompts_per_step": PROMPTS, "group_size": SAMPLES, "max_response_tokens": 9},
    # A large adam_eps keeps the size of a gradient visible, and the rate is high, so that the second update of a batch
    # starts with ratios far from 1, where bounds and caps decide.
    "trainer": {"kind": "torch", "lr": 24.0, "adam_eps": 1.0, "max_grad_norm": 1e9, "layout": "padded"},
}
TWO = {"updates_per_batch": 2}
UPDATES_AND_KL = TWO | {"kl": {"coef": 0.25}}
BASES = {
    "bare": {},
    "two updates": TWO,
    "KL": UPDATES_AND_KL,
    "adaptive KL": TWO | {"kl": {"coef": 0.25, "target": 1e9, "horizon_steps": 2}},
    "KL in the reward": UPDATES_AND_KL
    | {"kl": {"coef": 0.25, "place": "reward", "target": 1e9}, "advantage": {"kind": "reinforce_plus_plus"}},
    "CISPO, KL": UPDATES_AND_KL | {"policy_loss": {"kind": "cispo"}},
    "no std": TWO | {"advantage": {"kind": "group", "normalize_std": False}},
    "CISPO": {"policy_loss": {"kind": "cispo"}},
    "entropy": {"entropy_coef": 0.1, "entropy_target": 1.0},
    "the sampler's log-probabilities": {"old_logprobs": "rollout"},
    "likelihood": {"likelihood_coef": 0.25},
}
# Each kind of each union, where its options can act.
for _kind in POLICY_LOSSES:
    BASES[_kind] = TWO | {"policy_loss": {"kind": _kind}}
for _kind in ADVANTAGES:
    BASES[_kind] = TWO | {"advantage": {"kind": _kind}}
for _kind in CORRECTIONS:
    BASES[_kind] = TWO | {"correction": {"kind": _kind}}
for _kind in ("topr", "dppo", "aspo"):  # a weight of 1 is cut by a cap below 1
    BASES[f"{_kind}, one update"] = {"policy_loss": {"kind": _kind}}
BASES["gae, a lambda"] = TWO | {"advantage": {"kind": "gae", "lam": 0.5, "gamma": 0.9, "lam_value": 0.25}}
BASES["gae, its length"] = TWO | {"advantage": {"kind": "gae", "length_adaptive_alpha": 0.75}}
BASES["pass_at_k"]["advantage"] |= {"success_reward": 2.0}
# Among 46 tokens the default share is one token, and covariances are far below 1.
BASES["clip_cov"]["policy_loss"] |= {"cov_fraction": 0.2, "cov_low": 0.1, "cov_high": 9.0}
BASES["kl_cov"]["policy_loss"] |= {"cov_fraction": 0.2}
DEFAULT_KIND = {"policy_loss": "ppo_clip", "advantage": "group", "correction": "none"}
LEAVES = tree.leaves(AlgorithmOptions)
PATHS = tree.paths(AlgorithmOptions)


def config_of(algorithm):
    return make_config(TrainConfig, ROOT | {"algorithm": algorithm}, {}, file="run.toml")


def unchecked_config_of(algorithm):
    """The same without the rules that refuse idle options: what would have happened."""
    return TrainConfig.model_validate(ROOT | {"algorithm": algorithm})


@cache
def scored_rollouts():
    """Four prompts x three samples of uneven length and reward, part of it earned at once, a third of them truncated."""
    generator = torch.Generator().manual_seed(3)
    rollouts = []
    for row in range(PROMPTS):
        prompt = Prompt(row=row, tokens=(row,), text="")
        for sample in range(SAMPLES):
            response = torch.randint(VOCAB, (2 + row + sample,), generator=generator).tolist()
            rollouts.append(
                Rollout(
                    prompt=prompt,
                    group_id=row,
                    sample=sample,
                    tokens=(row, *response),
                    response_mask=(False,) + (True,) * len(response),
                    rollout_logprobs=(0.0, *(-4.0 * torch.rand(len(response), generator=generator)).tolist()),
                    policy_versions=(-1,) + (0,) * len(response),
                    finish_reason="length" if sample == 1 else "stop",
                    text="",
                    reward=float((row + 2 * sample) % 3 + 0.25 * row),
                    token_rewards=(None, 0.5 * sample, *(None,) * (len(response) - 1)),
                    reward_parts={"one": float((row + sample) % 2), "two": float(3 * sample**2)},
                )
            )
    return rollouts


def learned(config):
    """The losses of one batch's updates and the weights after it. The reference is another policy than the learner."""
    model = tiny_models.bigram(rows=((0.4, 0.3, 0.2, 0.1),) * VOCAB)
    objective = PolicyObjective(
        config.algorithm,
        temperature=config.rollout.temperature,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    trainer = TorchTrainer(model, config.trainer, total_steps=2, keeps_reference=objective.uses_reference)
    with torch.no_grad():
        model.table += torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4))
    console = types.SimpleNamespace(phase=lambda *_: contextlib.nullcontext(), advance=lambda _: None)
    critic = _Guessing() if config.has_critic else None
    parts = {"config": config, "objective": objective, "trainer": trainer, "critic": critic, "teachers": None}
    session = types.SimpleNamespace(**parts, console=console, step=0)
    losses = []
    for _ in range(2):  # what adapts after a batch shows in the next
        metrics = learn(session, weigh(session, scored_rollouts()))
        objective.adapt(merge_metrics(metrics))
        if objective.uses_reference and config.algorithm.kl.refresh_steps:
            trainer.refresh_reference()
        losses += [m[name].value for m in metrics for name in ("loss", "critic_saw") if name in m]
    assert model.table.isfinite().all()
    return losses + model.table.detach().flatten().tolist()


class _Guessing:
    """A critic that foresees some number of every token; its loss is the sum of what it is told to learn."""

    def values(self, batch):
        return torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(6))

    def step(self, batch):
        return {"critic_saw": Metric("sum", float((batch.token_weights * batch.returns).sum()))}

    def remember(self, *, moments):
        pass

    def forget(self):
        pass


def inner_type(annotation):
    """float of `float | None`."""
    parts = [part for part in get_args(annotation) if part is not type(None)]
    is_optional = type(None) in get_args(annotation)
    return parts[0] if is_optional else annotation


def other_values(leaf, value):
    """Values of this option that are allowed and differ from `value`: all choices, or numbers just off its bounds."""
    kind = inner_type(leaf.field.annotation)
    if get_origin(kind) is Literal:
        return [choice for choice in get_args(kind) if choice != value]
    if kind is bool:
        return [not value]
    assert kind in (int, float), f"{leaf.path}: add a way to vary {leaf.field.annotation}"
    low = lower_bound(leaf)
    numbers = (low, low + 1) if kind is int else (low, low + 1e-6, low + 0.5, low + 0.75, low + 1.35)
    return [number for number in numbers if number != value]


def with_option(algorithm, path, value):
    """A copy of the table with one option set; a new `kind` starts its table anew."""
    changed = copy.deepcopy(algorithm)
    *tables, name = path.split(".")
    place = changed
    for table in tables:
        place = place.setdefault(table, {})
    if name == "kind" and len(kinds_at(path)) > 1:
        place.clear()
    place[name] = value
    if tables and len(kinds_at(f"{tables[0]}.kind")) > 1:
        place.setdefault("kind", DEFAULT_KIND[tables[0]])
    return changed


def kinds_at(path):
    """The variants that this path's table may be of, if it is one of several."""
    return sorted({leaf.kind for leaf in LEAVES if leaf.path == path and leaf.kind is not None})


def changes(base):
    """(path, values): other values of every option that the base config has, each choice of a word by itself, numbers
    together: of several sizes, one may lie where nothing of this batch is."""
    algorithm = config_of(base).algorithm
    current = tree.values(algorithm)
    for path, value in current.items():
        if path == "preset" and base != TWO:
            continue  # what is set beside a preset wins, so only the bare table shows what it does
        owners = [leaf for leaf in LEAVES if leaf.path == path]
        if path.endswith(".kind") and len(owners) > 1:
            if path == "policy_loss.kind" and not algorithm.ratio_moves:
                continue  # where every ratio is 1, most losses have one value and one gradient
            yield from ((path, [kind]) for kind in kinds_at(path) if kind != value)
            continue
        table_kind = current.get(f"{path.rpartition('.')[0]}.kind")
        leaf = next(leaf for leaf in owners if len(owners) == 1 or leaf.kind == table_kind)
        others = other_values(leaf, value)
        yield from [(path, [o]) for o in others] if isinstance(others[0], (str, bool)) else [(path, others)]


@cache
def outcome_of_base(name):
    return learned(config_of(BASES[name]))


CHANGES = [(name, path, values) for name, base in BASES.items() for path, values in changes(base)]


@pytest.mark.parametrize("name", BASES)
def test_an_option_moves_what_is_learned_or_is_refused(name):
    dead = [f"{path} = {values}" for base, path, values in CHANGES if base == name and not acts(name, path, values)]
    assert dead == [], "accepted, and it changed nothing"


def acts(name, path, values):
    """True where one of the values moves something, or all are refused; a refusal must be right."""
    has_moved, is_accepted = False, False
    for value in values:
        algorithm, refusal = with_option(BASES[name], path, value), None
        try:
            config = config_of(algorithm)
            has_moved = has_moved or learned(config) != outcome_of_base(name)
            is_accepted = True
        except (ConfigError, RewardError) as error:
            # a loss of whole sequences is refused where tokens earn rewards of their own
            refusal = str(error)
        if refusal is not None:
            check_refusal(name, path, value, refusal)
    return has_moved or not is_accepted


def check_refusal(name, path, value, refusal):
    """A refusal names the option, and one for idleness is right: unchecked, nothing would have changed."""
    algorithm = with_option(BASES[name], path, value)
    if not any(line.startswith(f"algorithm.{path} ") for line in refusal.splitlines()):
        return  # it is another option, set by the base, that can no longer act
    if "cannot act" in refusal or "only used" in refusal:
        told = f"{path} = {value} is refused, although it would have acted"
        assert learned(unchecked_config_of(algorithm)) == outcome_of_base(name), told


def test_every_option_is_varied_and_accepted_somewhere():
    accepted = set()
    for name, path, values in CHANGES:
        for value in values if path not in accepted else ():
            with contextlib.suppress(ConfigError):
                config_of(with_option(BASES[name], path, value))
                accepted.add(path)
    assert accepted == set(PATHS)


def test_the_same_batch_learns_the_same_twice():
    # otherwise every option would seem to move something
    assert learned(config_of({})) == learned(config_of({}))
