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
from strop.types import merge_metrics


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


# ---- older weights --------------------------------------------------------------------------------------------------


def rollout_over_an_update(number, versions=(3, 3, 3, 4, 4)):
    prompt, response = (5, 6), (7, 8, 9, 10, 11)
    rollout = make_rollout(prompt, response, row=number, sample=number % 2, reward=float(number))
    logprobs = (0.0, 0.0, *(-2.0 - 0.1 * place for place in range(5)))
    return replace(rollout, policy_versions=(-1, -1, *versions), rollout_logprobs=logprobs, group_id=number // 2)


def ahead_session(**rollout):
    session = session_of({})
    values = {"prompts_per_step": 2, "group_size": 2, "max_off_policy_steps": 5, "streaming": True, **rollout}
    root = {"model": {"path": "m"}, "data": {"kind": "jsonl", "path": "d"}, "reward": {"kind": "exact"}}
    session.config = make_config(TrainConfig, root | {"rollout": values}, {}, file="run.toml")
    session.objective = PolicyObjective(session.config.algorithm, temperature=1.0, max_response_tokens=9)
    return session


def test_tokens_of_older_weights_than_the_last_ones_can_be_left_out_of_the_loss():
    """Versions [3, 3, 3, 4, 4] give the mask [0, 0, 0, 1, 1]; the advantage is that of the whole response either way."""
    rollouts = [rollout_over_an_update(0), *(rollout_over_an_update(n, (4,) * 5) for n in (1, 2, 3))]
    whole, masked = (weigh(ahead_session(mask_older_tokens=masks), rollouts) for masks in (False, True))
    assert whole.loss_mask.int().tolist() == [0, 0, 1, 1, 1, 1, 1] * 4
    assert masked.loss_mask.int().tolist() == [0, 0, 0, 0, 0, 1, 1] + [0, 0, 1, 1, 1, 1, 1] * 3
    assert masked.advantages.tolist() == whole.advantages.tolist()


def test_ratios_are_to_the_log_probabilities_at_which_tokens_were_sampled():
    """Version 3 sampled, version 5 learns: ratio = exp(trainer's now - the sampler's then), and none is 1."""
    session = ahead_session()
    batch = weigh(session, [rollout_over_an_update(n) for n in range(4)])
    assert batch.old_logprobs.tolist() == batch.rollout_logprobs.tolist()
    now = session.trainer.logprobs(batch, model="policy", temperature=1.0)
    ratios = (now - batch.rollout_logprobs)[batch.loss_mask].exp()
    metrics = merge_metrics(learn(session, batch))
    assert metrics["ratio_max"].value == pytest.approx(float(ratios.max()), rel=1e-5)
    assert metrics["ratio_min"].value == pytest.approx(float(ratios.min()), rel=1e-5)
    assert not ((ratios - 1).abs() < 1e-3).any()


def test_a_response_over_an_update_is_not_compared_with_the_trainer(monkeypatch):
    """What older weights read of it is in the sampler's cache: even its newest tokens are no other's log-probabilities."""
    session = ahead_session()
    monkeypatch.setattr(type(session.trainer), "num_steps", 5)
    batch = weigh(session, [rollout_over_an_update(0, (4, 4, 4, 5, 5)), rollout_over_an_update(1, (5,) * 5)])
    assert batch.is_fresh.tolist() == [False] * 7 + [True] * 7
