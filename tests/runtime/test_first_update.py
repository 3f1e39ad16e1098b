"""The first update of a batch, through the loop's own `weigh` and `learn` into the real trainer: it is exactly on-policy."""

import contextlib
import types
from dataclasses import replace

import pytest
import tiny_models
from trainers.made_batches import make_rollout, make_trainer, random_rows

from strop.algorithms import PolicyObjective
from strop.config import TrainConfig, make_config
from strop.runtime.learning import learn, weigh
from strop.trainers.forward import TokenScorer


def updates_of(algorithm, layout, *, truncated=(), budget=30):
    """Metrics of each update of one batch of 4 prompts x 2 samples, in micro-batches of a few sequences. `truncated`: the
    prompts whose responses hit the limit."""
    values = {
        "model": {"path": "m"},
        "data": {"kind": "jsonl", "path": "d"},
        "reward": {"kind": "exact"},
        "rollout": {"prompts_per_step": 4, "group_size": 2, "temperature": 0.9},
        "algorithm": algorithm,
    }
    config = make_config(TrainConfig, values, {}, file="run.toml")
    model = tiny_models.llama()
    session = types.SimpleNamespace(
        config=config,
        objective=PolicyObjective(config.algorithm, temperature=0.9, max_response_tokens=9),
        trainer=make_trainer(
            model, lr=0.05, layout=layout, max_tokens_per_micro_batch=budget, keeps_reference="kl" in algorithm
        ),
        critic=None,
        console=types.SimpleNamespace(phase=lambda *_: contextlib.nullcontext(), advance=lambda _: None),
        teachers=None,
        step=0,
    )
    rollouts = []
    for i, (prompt, response) in enumerate(random_rows(3, vocab=tiny_models.VOCAB, count=8)):
        finish = "length" if i // 2 in truncated else "stop"
        rollout = make_rollout(prompt, response, row=i // 2, sample=i % 2, reward=float(i % 2), finish_reason=finish)
        rollouts.append(replace(rollout, rollout_logprobs=(-1.0,) * len(rollout.tokens)))
    return learn(session, weigh(session, rollouts))


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("kind", ["ppo_clip", "kl_cov"])
def test_every_ratio_of_the_first_of_several_updates_is_exactly_1(kind, layout):
    first, second = updates_of({"updates_per_batch": 2, "policy_loss": {"kind": kind}}, layout)
    assert (first["ratio_min"].value, first["ratio_max"].value) == (1.0, 1.0)
    assert second["ratio_min"].value < 0.99  # and a later one divides by the policy before the first
    assert second["ratio_max"].value > 1.01


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_every_ratio_of_the_only_update_is_exactly_1_after_a_pass_for_old_logprobs(layout):
    (only,) = updates_of({"policy_loss": {"kind": "clip_cov"}}, layout)
    assert (only["ratio_min"].value, only["ratio_max"].value) == (1.0, 1.0)


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize("truncated", [(), (1,)])
def test_the_kl_to_a_reference_that_is_the_policy_is_exactly_0(layout, truncated):
    """Rounding would have a gradient, and AdamW would follow it. Sequences that leave the loss are in no micro-batch of the
    update, and so in none of the reference."""
    kl = {"coef": 0.1, "kind": "k2"}
    (only,) = updates_of({"kl": kl, "mask_truncated": True}, layout, truncated=truncated)
    assert only["kl_ref_k2"].value == 0.0


def test_the_first_update_divides_by_the_sampler_where_it_is_asked_to():
    # the sampler gave every token -1, the model most of them less
    first, _ = updates_of({"updates_per_batch": 2, "old_logprobs": "rollout"}, "padded")
    assert first["ratio_min"].value < 0.9


def test_the_first_update_that_is_made_is_on_policy_where_a_part_before_it_had_no_token():
    # mask_truncated empties the first part: prompts 0 and 1
    skipped, made = updates_of({"updates_per_batch": 2, "mask_truncated": True}, "packed", truncated=(0, 1))
    assert skipped["skipped_steps"].value == 1
    assert (made["ratio_min"].value, made["ratio_max"].value) == (1.0, 1.0)


@pytest.mark.parametrize("kind, sequences", [("ppo_clip", [4, 4, 4]), ("kl_cov", [4, 4, 4, 4])])
def test_the_first_updates_old_logprobs_are_only_computed_where_something_takes_them(kind, sequences, monkeypatch):
    # 8 sequences, 2 updates of 4 each: passes for old_logprobs of the later or of both, then one over each update
    seen, call = [], TokenScorer.__call__
    monkeypatch.setattr(TokenScorer, "__call__", lambda *a, **k: (seen.append(a[1].num_sequences), call(*a, **k))[1])
    updates_of({"updates_per_batch": 2, "policy_loss": {"kind": kind}}, "packed", budget=10_000)
    assert seen == sequences
