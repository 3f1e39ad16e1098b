"""From scored rollouts to a weighed batch: all of the step count for advantages and metrics, whatever enters the loss, and
every pass for log-probabilities is made at the sampling temperature."""

import contextlib
import types
from dataclasses import replace

import pytest
import tiny_models
from commands.small_runs import metrics, small_once, strop
from trainers.made_batches import make_rollout, make_trainer, random_rows

from strop.algorithms import PolicyObjective
from strop.config import TrainConfig, make_config
from strop.runtime.collect import rollout_metrics
from strop.runtime.learning import learn, weigh


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


def session_of(algorithm, *, lr=0.05, layout="padded"):
    values = {
        "model": {"path": "m"},
        "data": {"kind": "jsonl", "path": "d"},
        "reward": {"kind": "exact"},
        "rollout": {"prompts_per_step": 2, "group_size": 2},
        "algorithm": algorithm,
    }
    config = make_config(TrainConfig, values, {}, file="run.toml")
    return types.SimpleNamespace(
        config=config,
        objective=PolicyObjective(config.algorithm, temperature=1.0, max_response_tokens=9),
        trainer=make_trainer(tiny_models.llama(), lr=lr, layout=layout, max_tokens_per_micro_batch=30),
        critic=None,
        console=types.SimpleNamespace(phase=lambda *_: contextlib.nullcontext(), advance=lambda _: None),
        teachers=None,
        step=0,
    )


def rollouts_of(rewards, *, truncated=()):
    """Two prompts x two samples; `truncated`: places of rollouts that hit the limit."""
    found = []
    for i, (prompt, response) in enumerate(random_rows(3, vocab=tiny_models.VOCAB, count=4)):
        finish = "length" if i in truncated else "stop"
        rollout = make_rollout(prompt, response, row=i // 2, sample=i % 2, reward=rewards[i], finish_reason=finish)
        found.append(replace(rollout, rollout_logprobs=(-1.0,) * len(rollout.tokens)))
    return found


def test_a_truncated_rollout_counts_in_its_group_and_not_in_the_loss():
    """Rewards [1, 0 | 3, 1]: distances from the means +-.5 and +-1. The second is masked; the first keeps its .5."""
    session = session_of({"mask_truncated": True, "advantage": {"kind": "group", "normalize_std": False}})
    batch = weigh(session, rollouts_of([1.0, 0.0, 3.0, 1.0], truncated=[1]))
    assert len(batch.lengths) == 3
    assert [batch.advantages[batch.sequence_ids == s].unique().tolist() for s in range(3)] == [[0.5], [1.0], [-1.0]]


def test_shares_are_of_prompts_and_lengths_of_all_rollouts():
    """Three of four rollouts have a score; one of two prompts has equal ones; the truncated one has none."""
    rollouts = rollouts_of([1.0, 1.0, 3.0, None], truncated=[3])
    found = rollout_metrics(rollouts)
    assert found["equal_reward_groups"].value == 1.0  # [1, 1] and [3]: a group of one is equal too
    assert found["truncated"].value == 0.25
    found = rollout_metrics(rollouts_of([1.0, 1.0, 3.0, 2.0]))
    assert found["equal_reward_groups"].value == 0.5
    assert found["reward"].value == 1.75


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_kl_cov_leaves_weights_alone_where_nothing_is_learned(layout):
    """Equal rewards: no advantage, no covariance, no token to hold; whatever rounding says of later updates."""
    session = session_of({"updates_per_batch": 2, "policy_loss": {"kind": "kl_cov"}}, layout=layout)
    updates = learn(session, weigh(session, rollouts_of([1.0] * 4)))
    assert [m["grad_norm"].value for m in updates] == [0.0, 0.0]


@pytest.mark.parametrize("flags", [("--algorithm.kl.coef", "0.1"), ()], ids=["reference", "old"])
def test_every_pass_is_made_at_the_sampling_temperature(small, tmp_path, flags):
    """At the start the reference is the policy and the KL 0; with a learning rate of nothing the second update's ratios are 1.
    A pass at another temperature would differ by tenths of a nat."""
    flags = (
        *flags,
        "--rollout.temperature",
        "0.5",
        "--num-steps",
        "1",
        "--lr",
        "1e-12",
        "--run.folder",
        tmp_path / "run",
    )
    assert strop("train", small.train, *flags).code == 0
    (row,) = metrics(tmp_path / "run")
    assert row.get("kl_ref_k3", 0.0) < 1e-9
    assert row["ratio_min"] == pytest.approx(1, abs=1e-4)
    assert row["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert row["logprob_gap"] < 1e-4
