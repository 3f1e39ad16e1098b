"""Sampling ahead: what makes up for older policies follows by itself, is refused where it is missing, and stays what it was."""

import tomllib

import pytest

from strop.config import TrainConfig, make_config
from strop.config.render import to_toml
from strop.types import ConfigError

ROOT = {"model": {"path": "m"}, "data": {"kind": "jsonl", "path": "d"}, "reward": {"kind": "exact"}}
AHEAD = "rollout.max_off_policy_steps"


def made(overrides, values=ROOT, text=""):
    return make_config(TrainConfig, values, overrides, file="x.toml", text=text)


def corrected_by(config):
    return config.algorithm.old_logprobs, config.algorithm.correction.kind


@pytest.mark.parametrize(
    "more, wanted",
    [
        ({}, ("rollout", "none")),
        ({"algorithm.preset": "cispo"}, ("rollout", "none")),
        ({"algorithm.policy_loss.kind": "reinforce"}, ("trainer", "truncate")),  # no ratio
        ({"algorithm.preset": "rloo"}, ("trainer", "truncate")),
        ({"algorithm.veto_ratio": 1e-3}, ("trainer", "truncate")),  # it compares with the trainer's own
        ({"algorithm.correction.kind": "mask"}, ("trainer", "mask")),
        ({"algorithm.old_logprobs": "rollout"}, ("rollout", "none")),
    ],
)
def test_what_makes_up_for_older_policies_follows_by_itself(more, wanted):
    assert corrected_by(made({AHEAD: 1, **more})) == wanted
    assert corrected_by(made({AHEAD: "1", **more})) == wanted  # as a flag gives it
    assert corrected_by(made({AHEAD: 0}))[1] == "none"


def test_where_it_comes_from_is_said_and_nobody_is_blamed_for_it():
    config = made({AHEAD: 2})
    assert config.origin("algorithm.old_logprobs") == AHEAD
    assert corrected_by(made({})) == ("trainer", "none")


def test_a_runs_own_config_follows_the_steps_that_a_flag_asks_for():
    for ahead, more in ((0, {}), (1, {}), (1, {"algorithm.policy_loss.kind": "reinforce"})):
        text = to_toml(made({AHEAD: ahead, **more}))
        values = tomllib.loads(text)
        assert corrected_by(made({}, values, text)) == corrected_by(made({AHEAD: ahead, **more}))
        for other in (0, 2):
            assert corrected_by(made({AHEAD: other}, values, text)) == corrected_by(made({AHEAD: other, **more}))


@pytest.mark.parametrize("more", [{"algorithm.old_logprobs": "trainer"}, {"algorithm.correction.kind": "none"}])
def test_without_a_correction_it_is_refused(more):
    with pytest.raises(ConfigError, match=r"nothing would make up for that. Leave both out for the default"):
        made({AHEAD: 1, **more})


@pytest.mark.parametrize(
    "more, message",
    [
        (
            {"algorithm.updates_per_batch": 2},
            r"max_off_policy_steps must be 0 or at least .*updates_per_batch = 2, got 1",
        ),
        ({"rollout.from_folder": "runs"}, r"max_off_policy_steps must be 0 with rollout.from_folder, got 1"),
        ({"filter.equal_rewards": True, "filter.surplus": "keep"}, r"filter.surplus must be drop"),
        ({"engine.kind": "vllm", "engine.sleep": True}, r"engine.sleep must be false"),
        ({"engine.kind": "vllm_in_process", "engine.sleep": True}, r"engine.sleep must be false"),
        ({"engine.kind": "sglang", "engine.sleep": True}, r"engine.sleep must be false"),
        ({"run.profile_steps": 1}, r"run.profile_steps must be 0"),
        ({"rollout.mask_older_tokens": True}, r"mask_older_tokens = True cannot act without rollout.streaming"),
        ({"rollout.streaming": True, "rollout.num_scorers": 2, "reward.kind": "math"}, r"num_scorers must be 0"),
        (
            {"rollout.streaming": True, "engine.kind": "vllm", "engine.pause_mode": "abort"},
            r"engine.pause_mode must be keep or wait",
        ),
        (
            {"rollout.streaming": True, "engine.kind": "sglang", "engine.pause_mode": "abort"},
            r"engine.pause_mode must be retract or in_place",
        ),
        (
            {"rollout.streaming": True, "reward.kind": "function", "reward.function": "a:b", "reward.batched": True},
            r"reward.batched must be false",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(more, message):
    with pytest.raises(ConfigError, match=message):
        made({AHEAD: 1, **more})


def test_streaming_needs_steps_ahead():
    with pytest.raises(
        ConfigError, match=r"streaming = True is only used when rollout.max_off_policy_steps is above 0"
    ):
        made({"rollout.streaming": True})
