"""Tables under names of the user's, [eval.sets.NAME]: they load, are overridden, are written again, and err by their names."""

import tomllib

import jsonschema
import pytest

from strop.config import TrainConfig, make_config, to_toml, tree
from strop.config.overrides import parse_flags
from strop.config.reference import entries, json_schema
from strop.types import ConfigError

JSONL = {"kind": "jsonl", "path": "a.jsonl"}
BASE = {"model": {"path": "m"}, "data": {"kind": "jsonl", "path": "d"}, "reward": {"kind": "exact"}}
SETS = {
    "aime-24": {"data": JSONL, "num_samples": 16, "reward": {"kind": "math"}},
    "sums": {"data": {"kind": "reasoning_gym", "name": "chain_sum", "options": {"min_terms": 2}}},
}


def load(overrides=None, **evaluation):
    given = {"sets": SETS} | evaluation
    return make_config(TrainConfig, BASE | {"eval": given}, overrides or {}, file="run.toml")


def refusal(overrides=None, **evaluation):
    with pytest.raises(ConfigError) as caught:
        load(overrides, **evaluation)
    return str(caught.value)


def test_each_named_table_is_an_options_object_of_its_own():
    config = load()
    assert list(config.eval.sets) == ["aime-24", "sums"]
    assert (config.eval.sets["aime-24"].reward.kind, config.eval.sets["sums"].reward) == ("math", None)
    assert config.eval.sets["sums"].data.options == {"min_terms": 2}


def test_values_stand_under_the_name_that_the_table_has():
    now = tree.values(load())
    assert now["eval.sets.aime-24.num_samples"] == 16
    assert now["eval.sets.sums.data.options"] == {"min_terms": 2}
    assert tree.defaults(load())["eval.sets.aime-24.num_samples"] is None
    assert "eval.sets" not in now
    assert tree.described(load(), "eval.sets.sums.top_k").startswith("Keep so many likeliest tokens")


@pytest.mark.parametrize(
    "root_path, path", [("eval.sets.NAME.data.path", "eval.sets.b-1.data.path"), ("eval.top_p",) * 2]
)
def test_a_path_is_known_by_its_place_in_the_tree(root_path, path):
    assert tree.general(TrainConfig, path) == root_path
    assert root_path in tree.paths(TrainConfig)


def test_a_flag_names_the_table_as_it_is_written_and_the_option_with_hyphens_or_underscores():
    flags = [
        "--eval.sets.aime-24.num-samples",
        "4",
        "--eval.sets.aime-24.greedy",
        "--eval.sets.sums.data.options.n",
        "3",
    ]
    given = parse_flags(TrainConfig, flags)
    assert given == {
        "eval.sets.aime-24.num_samples": "4",
        "eval.sets.aime-24.greedy": "true",
        "eval.sets.sums.data.options.n": 3,
    }
    config = load(given)
    assert (config.eval.sets["aime-24"].num_samples, config.eval.sets["aime-24"].greedy) == (4, True)
    assert config.eval.sets["sums"].data.options == {"min_terms": 2, "n": 3}
    assert config.origins["eval.sets.aime-24.num_samples"] == "command line"


def test_a_flag_may_make_a_set_that_the_file_has_not():
    config = load({"eval.sets.new.data.kind": "jsonl", "eval.sets.new.data.path": "n"}, sets={})
    assert config.eval.sets["new"].data.path == "n"


def test_a_short_name_never_means_an_option_of_a_named_table():
    assert load({"temperature": 0.5}).rollout.temperature == 0.5
    assert "top_p is valid as eval.top_p; write the whole path" in refusal({"top_p": 0.5})


def test_another_kind_from_the_command_line_replaces_that_of_the_file():
    assert load({"eval.sets.aime-24.reward.kind": "number"}).eval.sets["aime-24"].reward.tolerance == 0.0


def test_what_is_written_loads_again_as_the_same_config():
    config = load({"eval.sets.aime-24.top_k": 3})
    text = to_toml(config)
    again = tree.values(make_config(TrainConfig, tomllib.loads(text), {}, file="run.toml"))
    assert again == tree.values(config) | {"run.folder": "runs/run"}
    assert "[eval.sets.aime-24]" in text
    assert "top_k = 3 # command line" in text


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            {"eval.sets.sums.topk": 1},
            "eval.sets.sums.topk is not an option. The nearest option is eval.sets.sums.top_k.",
        ),
        ({"eval.sets.sums.every_steps": 1}, "every_steps is valid as eval.every_steps."),
        ({"eval.sets.sums.top_p": 2}, "eval.sets.sums.top_p must be less than or equal to 1, got 2. (command line)"),
        ({"eval.sets.sums.data.size": 0}, "eval.sets.sums.data.size must be greater than or equal to 1, got 0."),
        ({"eval.sets.new.top_k": 1}, "eval.sets.new.data must be given. Add a table [eval.sets.new.data] with kind"),
        ({"eval.sets.sums.data.kind": "csv"}, "eval.sets.sums.data.kind must be one of jsonl, parquet, reasoning_gym"),
        ({"eval.sets.sums.data.path": "x"}, "eval.sets.sums.data.path is not an option here."),
        ({"eval.sets.sums": "x"}, "eval.sets.sums must be a table, got 'x'."),
        ({"eval.sets.sums.reward.tolerance": 1}, "eval.sets.sums.reward.kind must be given. It may be exact, number,"),
    ],
)
def test_what_is_wrong_in_a_named_table_is_said_by_its_whole_path(overrides, message):
    assert message in refusal(overrides)


@pytest.mark.parametrize("name", ["a b", "a/b", "", "a.b"])
def test_a_name_that_no_file_or_metric_could_carry_is_refused(name):
    assert "must be named by letters, digits, - and _" in refusal(sets={name: {"data": JSONL}})


@pytest.mark.parametrize(
    "evaluation, message",
    [
        (
            {"top_p": 0.5, "sets": {"a": {"data": JSONL, "top_p": 0.9}}},
            "eval.top_p = 0.5 cannot act: every set has a top_p",
        ),
        (
            {"sets": {"a": {"data": JSONL, "num_samples": 0, "top_k": 2}}},
            "eval.sets.a.top_k = 2 is only used for sampled",
        ),
        ({"num_samples": 0, "top_k": 2}, None),  # aime-24 samples
        (
            {"num_samples": 0, "top_k": 2, "sets": {"a": {"data": JSONL}}},
            "eval.top_k = 2 is only used for sampled answers",
        ),
        ({"sets": {"a": {"data": JSONL | {"shuffle": False}}}}, "eval.sets.a.data.shuffle = False cannot act"),
        (
            {"sets": {"a": {"data": JSONL, "greedy": False, "num_samples": 0}}},
            "eval.sets.a.num_samples must be above 0 when",
        ),
        (
            {"num_samples": 0, "success_reward": 0.5, "sets": {"a": {"data": JSONL}}},
            "eval.success_reward = 0.5 is only used",
        ),
        (
            {"sets": {}, "keep_best": False},
            "eval.keep_best = False cannot act without eval.data or a table [eval.sets.NAME]",
        ),
        ({"sets": {}, "best": "eval/pass@1"}, "eval.best = eval/pass@1 cannot act without eval.data"),
        ({"best": "eval/aime-24/pass@32"}, "eval.best must be one of eval/aime-24/sampled_reward"),
        (
            {"sets": {"a": {"data": JSONL, "reward": {"kind": "dataset"}}}},
            "eval.sets.a.data.kind must be reasoning_gym",
        ),
    ],
)
def test_what_cannot_act_or_is_broken_is_refused(evaluation, message):
    if message is None:
        load(**evaluation)
    else:
        assert message in refusal(**evaluation)


def test_a_set_takes_from_eval_what_it_leaves_out_and_eval_data_is_the_first_set():
    config = load(data=JSONL, top_p=0.5, sets={"a": {"data": JSONL, "top_p": 0.9}, "b": {"data": JSONL}})
    found = {name: (own.top_p, own.num_samples, own.greedy) for name, own in config.eval.all_sets.items()}
    assert list(found.items()) == [("", (0.5, 1, True)), ("a", (0.9, 1, True)), ("b", (0.5, 1, True))]


@pytest.mark.parametrize(
    "evaluation, metric",
    [
        ({}, "eval/aime-24/sampled_reward"),
        ({"data": JSONL}, "eval/sampled_reward"),
        ({"data": JSONL, "num_samples": 0}, "eval/greedy_reward"),
        ({"best": "eval/aime-24/maj@16"}, "eval/aime-24/maj@16"),
    ],
)
def test_the_first_set_decides_the_best_step_unless_said_otherwise(evaluation, metric):
    assert load(**evaluation).eval.deciding_metric == metric


def test_the_reference_and_the_schema_know_the_tables():
    found = {entry.path: entry for entry in entries(TrainConfig)}
    assert found["eval.sets.NAME.top_k"].takes == "whole number, >= 0 | none"
    schema = json_schema(TrainConfig)
    jsonschema.validate(BASE | {"eval": {"sets": SETS}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(BASE | {"eval": {"sets": {"a": {"data": JSONL, "topk": 1}}}}, schema)
