"""Where each value comes from: also of free tables, and of options that stand for another value."""

import pytest

from strop.algorithms.variants import loss_ops
from strop.config import TrainConfig, load_config, make_config, to_toml
from strop.config.policy_loss import DPPOOptions
from strop.config.tree import values
from strop.types import ConfigError

VALID = {"model": {"path": "m"}, "data": {"kind": "jsonl", "path": "d"}, "reward": {"kind": "exact"}}


def _config(overrides=None, **tables):
    return make_config(TrainConfig, VALID | tables, overrides or {}, file="first.toml")


def test_a_free_table_comes_from_where_its_entries_were_set():
    data = {"kind": "reasoning_gym", "name": "chain_sum", "options": {"min_terms": 2}}
    reward = {"kind": "dataset"}
    assert _config(data=data, reward=reward).origin("data.options") == "first.toml"
    more = _config({"data.options.max_terms": 3}, data=data, reward=reward)
    assert more.origin("data.options") == "first.toml and command line"
    assert _config(data={**data, "options": {}}, reward=reward).origin("data.options") == "default"


@pytest.mark.parametrize(
    "tables, path, value, source",
    [
        ({}, "run.folder", "runs/first", "the config file's name"),
        ({}, "guards.max_logprob_gap", 1e-3, "model.dtype = float32"),
        ({"model": {"path": "m", "dtype": "bfloat16"}}, "guards.max_logprob_gap", 0.1, "model.dtype = bfloat16"),
        (
            {"eval": {"data": {"kind": "jsonl", "path": "d"}}, "rollout": {"max_response_tokens": 77}},
            "eval.max_response_tokens",
            77,
            "rollout.max_response_tokens",
        ),
        (
            {"algorithm": {"updates_per_batch": 2, "policy_loss": {"kind": "ppo_clip", "eps_clip": 0.3}}},
            "algorithm.policy_loss.eps_clip_high",
            0.3,
            "eps_clip",
        ),
    ],
)
def test_an_option_that_follows_from_another_is_derived_with_its_value(tables, path, value, source):
    found = _config(**tables).all_derived()[path]
    assert (found.value, found.source) == (value, source)


def test_what_was_set_is_not_derived():
    algorithm = {"updates_per_batch": 2, "policy_loss": {"kind": "ppo_clip", "eps_clip": 0.3, "eps_clip_high": 0.4}}
    config = _config(algorithm=algorithm, guards={"max_logprob_gap": 1.0}, run={"folder": "x"})
    assert config.all_derived() == {}


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_the_bound_that_dppo_derives_is_the_one_that_the_loss_takes(divergence):
    found = {d.key: d.value for d in DPPOOptions(divergence=divergence).derived()}
    bound = loss_ops.DEFAULT_MAX_DIVERGENCE[divergence]
    assert found == {"max_divergence": bound, "max_divergence_high": bound}


def test_the_run_folders_config_says_what_an_option_was_derived_to():
    text = to_toml(_config(algorithm={"updates_per_batch": 2, "policy_loss": {"kind": "ppo_clip", "eps_clip": 0.3}}))
    assert 'eps_clip_high = "none" # default; derived: 0.3, from eps_clip' in text
    assert 'folder = "runs/first" # default; derived: runs/first, from the config file\'s name' in text


def test_a_run_s_own_config_has_the_origins_that_the_run_had(tmp_path):
    data = {"kind": "reasoning_gym", "name": "chain_sum", "options": {"min_terms": 2}}
    tables = {"data": data, "reward": {"kind": "dataset"}, "algorithm": {"preset": "cispo", "updates_per_batch": 2}}
    first = _config({"algorithm.policy_loss.eps_clip_high": 3.0, "data.options.max_terms": 4}, **tables)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(first))
    again = load_config(path)
    names = values(first)
    assert {p: again.origin(p) for p in names} == {p: first.origin(p) for p in names}
    assert again.origin("data.options") == "first.toml and command line"
    assert again.origin("algorithm.kl.coef") == "preset cispo"
    assert again.origin("trainer.lr") == "default"
    assert to_toml(again) == to_toml(first).replace("; derived: runs/first, from the config file's name", "")


def test_what_is_laid_over_a_run_s_own_config_is_said_to_be(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(to_toml(_config(algorithm={"preset": "cispo", "updates_per_batch": 2})))
    again = load_config(path, {"algorithm.kl.coef": 0.1})
    assert again.origin("algorithm.kl.coef") == "command line"
    assert again.origin("algorithm.updates_per_batch") == "first.toml"


def _own_config(tmp_path, overrides=None, **tables):
    path = tmp_path / "config.toml"
    path.write_text(to_toml(_config(overrides, **tables)))
    return path


def test_of_a_run_s_own_config_nothing_stays_of_a_kind_that_is_changed_but_what_somebody_set(tmp_path):
    vllm = {"engine.kind": "vllm", "engine.addresses": ["http://localhost:1"]}
    found = load_config(_own_config(tmp_path), vllm)
    assert (found.engine.kind, found.origin("engine.request_timeout_s")) == ("vllm", "default")
    with pytest.raises(ConfigError, match=r"engine\.max_sequences is not an option here"):
        load_config(_own_config(tmp_path, engine={"kind": "torch", "max_sequences": 8}), vllm)


@pytest.mark.parametrize("name", ["vapo", "dapo"])
def test_of_a_run_s_own_config_nothing_stays_of_its_preset_beside_another(tmp_path, name):
    path = _own_config(tmp_path, {"algorithm.preset": name, "algorithm.updates_per_batch": 2})
    found, wanted = load_config(path, {"algorithm.preset": "ppo"}), _config({"algorithm.preset": "ppo"})
    assert found.algorithm == wanted.algorithm.model_copy(update={"updates_per_batch": 2})
    assert (found.filter, found.length_penalty) == (wanted.filter, wanted.length_penalty)


def test_an_evaluation_is_not_held_to_the_rules_of_training(tmp_path):
    """It does not sample at the temperature of training."""
    held_out = {"data": {"kind": "jsonl", "path": "d"}}
    path = _own_config(tmp_path, rollout={"temperature": 3.0}, eval=held_out)
    vllm = {"engine.kind": "vllm", "engine.addresses": ["http://localhost:1"]}
    assert load_config(path, vllm, command="eval").engine.kind == "vllm"
    with pytest.raises(ConfigError, match=r"rollout\.temperature must be at most 2"):
        load_config(path, vllm)
    with pytest.raises(ConfigError, match=r"eval\.temperature must be at most 2"):
        load_config(path, vllm | {"temperature": 3.0}, command="eval")
