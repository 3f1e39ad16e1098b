"""VAPO's likelihood loss: -mean(logprobs) over the tokens of right answers, whatever the policy loss is averaged by."""

import contextlib
import math
import types
from dataclasses import replace

import pytest
import tiny_models
import torch
from made_batches import make_rollout, make_trainer, parameters, seen_gradients

from strop.algorithms import PolicyObjective
from strop.config import TrainConfig, make_config
from strop.runtime.learning import learn, weigh
from strop.types import ConfigError

VALID = {"model": {"path": "m"}, "data": {"kind": "jsonl", "path": "d"}, "reward": {"kind": "exact"}}
# The bigram model's rows: [.7,.2,.1], [.1,.6,.3], [.25,.25,.5].
RIGHT, OTHER = ((1,), (0,)), ((0,), (2, 2, 0))  # log-probability ln .1; ln .1, ln .5, ln .25


def _session(model, *, tokens=1000, **algorithm):
    tables = {"algorithm": {"policy_loss": {"kind": "reinforce"}, **algorithm}, "rollout": {"prompts_per_step": 2}}
    config = make_config(TrainConfig, VALID | tables, {}, file="x.toml")
    return types.SimpleNamespace(
        config=config,
        objective=PolicyObjective(config.algorithm, temperature=1.0, max_response_tokens=9),
        trainer=make_trainer(model, lr=0.1, max_tokens_per_micro_batch=tokens),
        critic=None,
        teachers=None,
        console=types.SimpleNamespace(phase=lambda *_: contextlib.nullcontext(), advance=lambda _: None),
        step=0,
    )


def _learn(rewards, *, penalty=None, finish_reason="stop", **more):
    """Metrics and gradient of a step on one rollout of each of two prompts, whose advantages are 0: one scored in a group."""
    model = tiny_models.bigram()
    session = _session(model, **more)
    rollouts = [
        make_rollout(*row, row=i, reward=reward, finish_reason=finish_reason)
        for i, (row, reward) in enumerate(zip((RIGHT, OTHER), rewards, strict=True))
    ]
    if penalty is not None:
        rollouts = [replace(r, reward=r.reward + penalty, length_penalty=penalty) for r in rollouts]
    with seen_gradients(model) as gradients:
        metrics = learn(session, weigh(session, rollouts))
    return metrics[-1], gradients.get("table"), parameters(model)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "prompt_mean", "constant_length"])
@pytest.mark.parametrize("tokens", [1, 5, 1000])
def test_the_loss_is_the_mean_over_tokens_of_right_answers_by_any_reduction_and_cut(reduction, tokens):
    # both right: -(ln .1 + ln .1 + ln .5 + ln .25) / 4 = (2.302585 x 2 + .693147 + 1.386294) / 4 = 1.671153; x .5 = .835576
    metrics, gradient, _ = _learn((1.0, 1.0), likelihood_coef=0.5, reduction=reduction, tokens=tokens)
    assert metrics["loss"].value == pytest.approx(0.835576, abs=1e-5)
    assert metrics["likelihood_loss"].value == pytest.approx(1.671153, abs=1e-5)
    # d(-ln p_y)/d z = p - [y]: row 0 has token 2 once: .5/4 x (.7, .2, -.9) = (.0875, .025, -.1125)
    assert gradient[0].tolist() == pytest.approx([0.0875, 0.025, -0.1125], abs=1e-6)


def test_wrong_answers_are_not_made_likelier():
    metrics, gradient, _ = _learn((1.0, 0.9), likelihood_coef=1.0)
    assert metrics["loss"].value == pytest.approx(-math.log(0.1), abs=1e-5)  # of the one right token
    assert gradient[0].tolist() == [0.0, 0.0, 0.0]  # only the wrong answer has tokens after token 0
    assert _learn((1.0, 0.9), likelihood_coef=1.0, likelihood_reward=0.9)[1][0].abs().max() > 0


def test_with_no_right_answer_nothing_is_added():
    metrics, gradient, _ = _learn((0.0, 0.5), likelihood_coef=1.0)
    assert metrics["loss"].value == 0.0
    assert gradient.abs().max() == 0.0
    assert metrics["likelihood_loss"].count == 0


def test_a_length_penalty_makes_no_right_answer_wrong():
    whole = _learn((1.0, 1.0), likelihood_coef=0.5)[0]["loss"].value
    assert _learn((1.0, 1.0), likelihood_coef=0.5, penalty=-0.3)[0]["loss"].value == pytest.approx(whole)


def test_without_the_option_nothing_is_measured():
    assert "likelihood_loss" not in _learn((1.0, 1.0))[0]


def test_the_reward_that_is_right_cannot_act_without_the_loss():
    with pytest.raises(ConfigError, match=r"likelihood_reward = 0\.5 is only used when"):
        make_config(TrainConfig, VALID | {"algorithm": {"likelihood_reward": 0.5}}, {}, file="x.toml")


def test_the_preset_vapo_has_it_with_the_paper_s_weight():
    algorithm = {"preset": "vapo", "updates_per_batch": 2}
    assert (
        make_config(TrainConfig, VALID | {"algorithm": algorithm}, {}, file="x.toml").algorithm.likelihood_coef == 0.1
    )


def test_a_mask_of_truncated_answers_holds_for_the_likelihood_too():
    _, _, before = _learn((0.0, 0.0), likelihood_coef=1.0)
    _, _, after = _learn((1.0, 1.0), likelihood_coef=1.0, mask_truncated=True, finish_reason="length")
    torch.testing.assert_close(after, before)
