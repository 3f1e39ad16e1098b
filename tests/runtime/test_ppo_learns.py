"""PPO on problems with known answers, through the loop's own `weigh` and `learn`, a real model and a real critic."""

import contextlib
import types

import pytest
import tiny_models
import torch
from trainers.made_batches import make_critic, make_rollout, make_trainer, masters

from strop.algorithms import PolicyObjective
from strop.config import TrainConfig, make_config
from strop.runtime.learning import learn, weigh

SAMPLES = 32


def session_of(*, lr, critic_lr, algorithm, total_steps=100, **critic):
    """A run of SAMPLES prompts a step, one sample each."""
    values = {
        "model": {"path": "m"},
        "data": {"kind": "jsonl", "path": "d"},
        "reward": {"kind": "exact"},
        "rollout": {"prompts_per_step": SAMPLES, "group_size": 1},
        "algorithm": {"advantage": {"kind": "gae"}} | algorithm,
        "critic": critic,
        "run": {"num_steps": 1000},
    }
    config = make_config(TrainConfig, values, {}, file="run.toml")
    model = tiny_models.llama(initializer_range=0.1)
    return types.SimpleNamespace(
        config=config,
        objective=PolicyObjective(config.algorithm, temperature=1.0, max_response_tokens=9),
        trainer=make_trainer(model, lr=lr),
        critic=make_critic(model, lr=critic_lr, lr_schedule="linear", total_steps=total_steps, eps_clip_value=None),
        teachers=None,
        console=types.SimpleNamespace(phase=lambda *_: contextlib.nullcontext(), advance=lambda _: None),
        step=0,
    )


def learn_from(session, tokens_and_rewards, prompt=(0,)):
    """One batch of these responses."""
    rollouts = []
    for i, (response, reward) in enumerate(tokens_and_rewards):
        row = session.step * SAMPLES + i
        rollouts.append(make_rollout(prompt, response, row=row, reward=reward))
    metrics = learn(session, weigh(session, rollouts))
    session.step += 1
    return metrics


@torch.no_grad()
def probabilities(session, tokens=(0,)):
    return session.trainer.model(torch.tensor([tokens])).logits[0, -1].softmax(-1)


@torch.no_grad()
def value_after(session, *tokens):
    hidden = session.critic.model.body(torch.tensor([tokens])).last_hidden_state
    return float(session.critic.model.head(hidden[0, -1]))


def test_a_bandit_is_solved_and_the_critic_says_what_its_best_arm_pays():
    """Arm 5 pays 1, arm 7 pays .6, the others nothing: the best policy always pulls 5, and then earns 1."""
    session = session_of(lr=0.01, critic_lr=0.01, algorithm={"updates_per_batch": 2})
    pays, generator = {5: 1.0, 7: 0.6}, torch.Generator().manual_seed(0)
    assert probabilities(session)[5] < 0.1
    for _ in range(40):
        arms = torch.multinomial(probabilities(session), SAMPLES, replacement=True, generator=generator).tolist()
        learn_from(session, [((arm,), pays.get(arm, 0.0)) for arm in arms])
    assert probabilities(session)[5] > 0.95
    assert value_after(session, 0) == pytest.approx(1.0, abs=0.05)


# From token 0 one goes to 1 or 2, then to 3 or 4, each with probability 1/2. What is earned: 1 for 1 3, nothing for 1 4,
# a quarter for both ends of 2. Values: after 0 1: (1 + 0) / 2 = .5; after 0 2: .25; after 0: (.5 + .25) / 2 = .375.
CHAIN = [((1, 3), 1.0), ((1, 4), 0.0), ((2, 3), 0.25), ((2, 4), 0.25)]
CHAIN_VALUES = {(0,): 0.375, (0, 1): 0.5, (0, 2): 0.25}


@pytest.mark.parametrize("lam", [1.0, 0.0])
def test_the_critic_reaches_the_true_values_of_a_chain(lam):
    """Whatever lambda: from the outcomes themselves, or by each state learning from the value of the next."""
    session = session_of(
        lr=0.01, critic_lr=0.01, algorithm={"advantage": {"kind": "gae", "lam": lam}}, only_first_steps=900
    )
    policy = {name: p.clone() for name, p in session.trainer.model.named_parameters()}
    for _ in range(100):
        metrics = learn_from(session, CHAIN)
    assert [value_after(session, *state) for state in CHAIN_VALUES] == pytest.approx(
        list(CHAIN_VALUES.values()), abs=0.02
    )
    assert all(torch.equal(p, policy[name]) for name, p in session.trainer.model.named_parameters())
    assert session.trainer.num_steps == 0
    assert session.critic.num_steps == 100
    assert not [name for part in metrics for name in part if name in ("loss", "lr", "grad_norm")]


def test_explained_variance_is_that_of_the_values_before_the_updates():
    """Returns 1, 0, .25, .25 on two tokens each, values .375 first and .5 or .25 then: what is left is .625, -.375, -.125,
    -.125 at the first tokens and .5, -.5, 0, 0 at the second: squares .390625 + .140625 + 2 x .015625 + .5 = 1.0625, mean 0.
    Returns: mean .375, squares 2 x (.390625 + .140625 + .03125) = 1.125. 1 - 1.0625 / 1.125 = .0556."""
    session = session_of(lr=0.01, critic_lr=0.01, algorithm={})
    exact = torch.tensor([0.0, 0.375, 0.5] * 2 + [0.0, 0.375, 0.25] * 2)
    session.critic.values = lambda batch: exact
    metrics = learn_from(session, CHAIN)
    (found,) = (part["explained_variance"].value for part in metrics if "explained_variance" in part)
    assert found == pytest.approx(1 - 1.0625 / 1.125, abs=1e-6)


def test_explained_variance_is_not_said_of_returns_that_are_all_the_same():
    session = session_of(lr=0.01, critic_lr=0.01, algorithm={})
    metrics = learn_from(session, [(response, 1.0) for response, _ in CHAIN])
    assert not [part for part in metrics if "explained_variance" in part]


def test_a_penalty_in_the_reward_lands_on_its_token():
    """Outcome 1, lambda 1, values 0: returns are 1 less the penalties from here on. k1 = old - ref, coefficient .5; the
    reference is one nat likelier at the second of three tokens: penalty -.5 there, returns 1.5, 1.5, 1."""
    session = session_of(lr=0.01, critic_lr=0.01, algorithm={"kl": {"coef": 0.5, "kind": "k1", "place": "reward"}})
    real, first = session.trainer.logprobs, {}

    def logprobs(batch, *, model="policy", temperature=1.0):
        if model == "policy":
            first["old"] = real(batch, temperature=temperature)
            return first["old"]
        return first["old"] + torch.tensor([0.0, 0.0, 1.0, 0.0])

    session.trainer.logprobs = logprobs
    batch = weigh(session, [make_rollout((0,), (1, 2, 3), reward=1.0)])
    assert batch.returns.tolist() == pytest.approx([0.0, 1.5, 1.5, 1.0], abs=1e-6)


def test_a_truncated_response_that_is_masked_teaches_the_critic_nothing():
    session = session_of(lr=0.01, critic_lr=0.01, algorithm={"mask_truncated": True})
    rollouts = [
        make_rollout((0,), (1, 2), row=i, reward=1.0, finish_reason=f) for i, f in enumerate(("stop", "length"))
    ]
    batch = weigh(session, rollouts)
    assert batch.names == ("sample 0 of prompt row 0",)
    assert batch.returns.tolist() == [0.0, 1.0, 1.0]
    assert batch.old_values is not None


@pytest.mark.parametrize("updates", [1, 2])
def test_a_batch_whose_policy_update_fails_leaves_policy_and_critic_as_they_were(updates):
    """The critic steps first, and then the policy's guard stops the batch."""
    session = session_of(lr=0.01, critic_lr=0.01, algorithm={"updates_per_batch": updates})
    learn_from(session, CHAIN * 8)  # from here on the critic's head is not 0
    before = masters(session.critic) | masters(session.trainer)
    session.trainer.max_logprob_gap = 1e-6
    steps = session.critic.num_steps
    with pytest.raises(Exception, match="max_logprob_gap must hold"):
        learn_from(session, CHAIN * 8)
    after = masters(session.critic) | masters(session.trainer)
    assert session.critic.num_steps > steps
    assert all(torch.equal(before[name], after[name]) for name in before)
