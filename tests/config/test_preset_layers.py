"""A preset lies below what is written beside it: the file's below the file, the command line's above the file."""

import pytest

from strop.config import TrainConfig, make_config
from strop.types import ConfigError

VALID = {"model": {"path": "m"}, "data": {"kind": "jsonl", "path": "d"}, "reward": {"kind": "exact"}}
OWN = {"updates_per_batch": 4, "policy_loss": {"kind": "ppo_clip", "eps_clip": 0.1}, "kl": {"coef": 0.1}}


def _algorithm(file_values, overrides):
    config = make_config(TrainConfig, VALID | {"algorithm": file_values}, overrides, file="run.toml")
    return config.algorithm, config.origin


def test_a_preset_of_the_command_line_is_what_runs_whatever_loss_the_file_has():
    found, origin = _algorithm(OWN, {"advantage_estimator": "cispo"})
    assert (found.policy_loss.kind, found.policy_loss.eps_clip, found.policy_loss.eps_clip_high) == ("cispo", 1.0, 4.0)
    assert found.kl.coef == 0.0  # CISPO's
    assert found.updates_per_batch == 4  # no preset sets it
    assert origin("algorithm.policy_loss.kind") == "preset cispo"
    assert origin("algorithm.updates_per_batch") == "run.toml"


def test_flags_win_over_the_preset_beside_them():
    flags = {"advantage_estimator": "cispo", "eps_clip_high": 3.0, "algorithm.kl.coef": 0.2}
    found, origin = _algorithm(OWN, flags)
    assert (found.policy_loss.eps_clip_high, found.kl.coef) == (3.0, 0.2)
    assert origin("algorithm.policy_loss.eps_clip_high") == "command line"


def test_a_preset_of_the_file_lies_below_the_file():
    found, _ = _algorithm({"preset": "cispo", **OWN}, {})
    assert (found.policy_loss.kind, found.policy_loss.eps_clip, found.kl.coef) == ("ppo_clip", 0.1, 0.1)
    assert found.policy_loss.eps_clip_high is None  # nothing of CISPO's stays in a table of another kind


def test_the_command_line_s_preset_takes_the_place_of_the_file_s():
    found, _ = _algorithm({"preset": "grpo", "updates_per_batch": 2}, {"algorithm.preset": "cispo"})
    assert (found.preset, found.policy_loss.kind, found.kl.coef, found.reduction) == (
        "cispo",
        "cispo",
        0.0,
        "token_mean",
    )


def test_the_command_line_can_take_the_file_s_preset_away():
    found, _ = _algorithm({"preset": "cispo", "updates_per_batch": 2}, {"algorithm.preset": "none"})
    assert (found.preset, found.policy_loss.kind) == (None, "ppo_clip")


def test_an_option_of_the_file_that_the_preset_s_loss_has_not_is_refused_not_dropped():
    own = {"updates_per_batch": 4, "policy_loss": {"kind": "ppo_clip", "eps_clip_c": 3.0}}
    with pytest.raises(ConfigError, match=r"policy_loss\.eps_clip_c is not an option here.*cispo has no lower branch"):
        _algorithm(own, {"advantage_estimator": "cispo"})
