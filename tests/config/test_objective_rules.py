"""Settings of [algorithm] that could do nothing, or only what rounding decides, are refused at load; those that act are not."""

import pytest

from strop.config import TrainConfig, make_config
from strop.types import ConfigError

ROOT = {"model": {"path": "m"}, "data": {"kind": "jsonl", "path": "d"}, "reward": {"kind": "exact"}}
IN_REWARD = {"advantage": {"kind": "reinforce_plus_plus"}, "kl": {"coef": 0.1, "place": "reward", "kind": "k1"}}


def load(algorithm):
    return make_config(TrainConfig, ROOT | {"algorithm": algorithm}, {}, file="run.toml")


@pytest.mark.parametrize(
    "algorithm, says",
    [
        # the reference would be the policy that sampled
        (
            IN_REWARD | {"kl": IN_REWARD["kl"] | {"refresh_steps": 1}, "updates_per_batch": 2},
            "algorithm.kl.refresh_steps must be 2",
        ),
        ({"kl": {"coef": 0.1, "refresh_steps": 1}}, "algorithm.kl.refresh_steps must be 2"),
        # probabilities differ by less than 1
        (
            {"updates_per_batch": 2, "policy_loss": {"kind": "dppo", "max_divergence": 1.5}},
            "max_divergence must be at most 1",
        ),
        (
            {"updates_per_batch": 2, "policy_loss": {"kind": "dppo", "max_divergence_high": 2}},
            "max_divergence_high must be",
        ),
        # log-ratios are held at -20
        ({"veto_ratio": 1e-9}, "algorithm.veto_ratio must be"),
        # rounding alone would decide
        ({"updates_per_batch": 2, "opsm_delta": 0}, "algorithm.opsm_delta must be"),
        # every weight, or every penalty, would be 0
        ({"correction": {"kind": "truncate", "max_ratio": 0}}, "algorithm.correction.max_ratio must be"),
        ({"correction": {"kind": "mask", "min_ratio": 0, "max_ratio": 0}}, "algorithm.correction.max_ratio must be"),
        ({"updates_per_batch": 2, "policy_loss": {"kind": "kl_cov", "cov_kl_coef": 0}}, "cov_kl_coef must be"),
    ],
)
def test_what_can_do_nothing_is_refused(algorithm, says):
    with pytest.raises(ConfigError, match=r"^algorithm\.") as error:
        load(algorithm)
    assert says in str(error.value)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"kl": {"coef": 0.1, "refresh_steps": 1}, "updates_per_batch": 2},  # later updates leave the reference
        IN_REWARD | {"kl": IN_REWARD["kl"] | {"refresh_steps": 2}},
        {"updates_per_batch": 2, "policy_loss": {"kind": "dppo", "divergence": "kl", "max_divergence": 1.5}},
        {"veto_ratio": 1e-8},
        # without a ratio the loss does not look at old_logprobs, but the penalty in the reward does
        IN_REWARD | {"policy_loss": {"kind": "reinforce"}, "old_logprobs": "rollout"},
    ],
)
def test_what_acts_is_taken(algorithm):
    load(algorithm)
