"""Overrides: dotted paths, leaf names that occur once, flags, and values as the command line gives them."""

import pytest

from strop.config import SFTConfig, TrainConfig, make_config
from strop.config.overrides import parse_flags
from strop.types import ConfigError

GYM = {"kind": "reasoning_gym", "name": "chain_sum"}


def make(flags=(), **more):
    values = {"model": {"path": "m"}, "data": {"kind": "jsonl", "path": "d"}, "reward": {"kind": "exact"}} | more
    overrides = flags if isinstance(flags, dict) else parse_flags(TrainConfig, flags)
    return make_config(TrainConfig, values, overrides, file="run.toml")


def refusal(flags=(), **more):
    with pytest.raises(ConfigError) as caught:
        make(flags, **more)
    return str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        ["--algorithm.kl.coef", "0.3"],
        ["--algorithm.kl.coef=0.3"],
        ["--coef", "0.3"],
        {"algorithm.kl.coef": 0.3},
        {"coef": "0.3"},
    ],
)
def test_all_spellings_of_an_option_mean_the_same(flags):
    assert make(flags).algorithm.kl.coef == 0.3


def test_hyphens_are_underscores_in_flags():
    config = make(["--updates-per-batch", "2", "--eps-clip=0.3", "--algorithm.policy-loss.eps-clip-high", "0.4"])
    assert config.algorithm.policy_loss.eps_clip == 0.3
    assert config.algorithm.policy_loss.eps_clip_high == 0.4


def test_a_name_that_occurs_more_than_once_outside_eval_is_refused_with_its_paths():
    assert refusal(["--path", "x"]) == "--path is ambiguous: it may be model.path or data.path. Write the whole path."
    assert refusal({"kind": "cispo"}).startswith("--kind is ambiguous")


@pytest.mark.parametrize("name", ["temperature", "max_response_tokens"])
def test_a_short_name_means_the_option_outside_eval(name):
    config = make([f"--{name}", "2"])
    assert (getattr(config.rollout, name), name in config.eval.model_fields_set) == (2, False)


def test_a_short_name_that_is_only_below_eval_is_refused_with_its_path():
    assert refusal(["--top-p", "0.9"]) == (
        "top_p is valid as eval.top_p; write the whole path: training samples from the whole distribution."
    )
    assert refusal({"num_samples": 2}).startswith("num_samples is valid as eval.num_samples; write the whole path")
    with pytest.raises(ConfigError, match=r"greedy is valid as eval\.greedy"):
        make(["--greedy"])


def test_in_eval_a_short_name_means_the_option_below_eval_where_there_is_one():
    flags = ["--temperature", "0.5", "--num-samples", "8", "--max-prompts=3", "--greedy", "--max-sequences", "4"]
    overrides = parse_flags(TrainConfig, flags, is_eval=True)
    values = {"model": {"path": "m"}, "data": {"kind": "jsonl", "path": "d"}, "reward": {"kind": "exact"}}
    values["eval"] = {"greedy": False, "data": {"kind": "jsonl", "path": "e"}}
    config = make_config(TrainConfig, values, overrides, file="run.toml", is_eval=True)
    assert (config.eval.temperature, config.eval.num_samples, config.eval.greedy) == (0.5, 8, True)
    assert (config.eval.data.max_prompts, config.data.max_prompts) == (3, None)
    assert (config.rollout.temperature, config.engine.max_sequences) == (1.0, 4)


def test_a_path_decides_between_two_options_of_one_name():
    config = make(["--rollout.temperature", "0.5"])
    assert (config.rollout.temperature, config.eval.temperature) == (0.5, 1.0)


def test_an_option_at_the_top_goes_by_its_name():
    assert make(["--seed", "5"]).seed == 5


@pytest.mark.parametrize(
    "flags, nearest",
    [
        (["--num-step", "3"], "run.num_steps"),
        (["--algorithm.policy_loss.eps_clp", "3"], "algorithm.policy_loss.eps_clip"),
        (["--trainer.group_size", "3"], "rollout.group_size"),
        ({"run.num-steps": 3}, "run.num_steps"),
        (["--temperatur", "3"], "rollout.temperature or eval.temperature"),
        (["--kl-coef", "3"], "nearest option is algorithm.kl.coef."),  # its path with underscores for dots
        (["--data-path", "3"], "nearest option is data.path or eval.data.path."),
        (["--bogus", "1"], "strop explain CONFIG"),  # nothing is near: how to see them all
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest(flags, nearest):
    message = refusal(flags)
    assert "is not an option" in message
    assert nearest in message


@pytest.mark.parametrize("flag", ["--no-such-flag", "--num-step"])
def test_an_unknown_flag_without_a_value_is_called_unknown(flag):
    with pytest.raises(ConfigError, match="is not an option"):
        make([flag])


def test_a_table_may_be_given_whole():
    from_python = make({"algorithm.kl": {"coef": 0.1, "kind": "k2"}})
    from_a_flag = make(["--algorithm.kl", "{coef = 0.1, kind = 'k2'}"])
    assert from_python.algorithm.kl == from_a_flag.algorithm.kl
    assert (from_python.algorithm.kl.coef, from_python.algorithm.kl.kind) == (0.1, "k2")


@pytest.mark.parametrize(
    "flags, value",
    [
        (["--overwrite"], True),
        (["--overwrite", "--seed", "3"], True),
        (["--seed", "3", "--overwrite"], True),
        (["--overwrite", "false"], False),
        (["--overwrite=false"], False),
        (["--run.overwrite"], True),
        ([], False),
    ],
)
def test_a_flag_of_a_true_or_false_option_may_stand_alone(flags, value):
    assert make(flags).run.overwrite is value


@pytest.mark.parametrize("flags", [["--num-steps"], ["--num-steps", "--overwrite"]])
def test_a_flag_of_another_option_needs_a_value(flags):
    with pytest.raises(ConfigError, match="--num-steps needs a value"):
        make(flags)


@pytest.mark.parametrize("flags", [["--stop-token-ids", "[1,106]"], ["--rollout.stop_token_ids=[1, 106]"]])
def test_lists_are_read_as_toml(flags):
    assert make(flags).rollout.stop_token_ids == (1, 106)


def test_a_list_that_is_no_toml_is_refused():
    for value in ("[1,", "[" + "9" * 5000 + "]", "[" * 5000):
        with pytest.raises(ConfigError, match="is not a TOML value"):
            make(["--stop-token-ids", value])
    assert refusal(["--stop-token-ids", "5"]).startswith("rollout.stop_token_ids must be ")


def test_negative_numbers_and_text_with_equal_signs_are_values():
    config = make(["--entropy-coef", "-0.01", "--data.system_prompt=a=b", "--run.folder", "x"])
    assert config.algorithm.entropy_coef == -0.01
    assert config.data.system_prompt == "a=b"


@pytest.mark.parametrize("args", [["num_steps", "3"], ["-n", "3"], ["--"], ["--seed", "3", "4"]])
def test_what_is_no_flag_is_refused(args):
    with pytest.raises(ConfigError, match="expected an option"):
        parse_flags(TrainConfig, args)


@pytest.mark.parametrize(
    "flags",
    [
        ["--seed", "3", "--seed", "4"],
        ["--eps-clip", "0.2", "--eps_clip=0.3"],
        # one option under two names: neither may win silently
        ["--updates-per-batch=2", "--eps-clip", "0.3", "--algorithm.policy_loss.eps_clip", "0.4"],
        ["--preset", "grpo", "--advantage-estimator", "cispo"],
    ],
)
def test_an_option_given_twice_is_refused(flags):
    with pytest.raises(ConfigError, match="twice"):
        make(flags)


def test_options_of_a_dataset_pass_by_their_own_names():
    config = make({"data.options.min_terms": 3, "data.options.deep.er": "x"}, data=GYM, reward={"kind": "dataset"})
    assert config.data.options == {"min_terms": 3, "deep": {"er": "x"}}


@pytest.mark.parametrize(
    "text, value",
    [
        ("true", True),
        ("false", False),
        ("3", 3),
        ("-0.5", -0.5),
        ("[1, 2]", [1, 2]),
        ("{a = 1}", {"a": 1}),
        ("'3'", "3"),
        ("some text", "some text"),
        ("05", "05"),
        ("[1,", "[1,"),
        ("3 # of them", "3 # of them"),
        ("1, b = 2", "1, b = 2"),
        ("1}\nx = {y = 2", "1}\nx = {y = 2"),
        ("", ""),
        ("9" * 5000, "9" * 5000),
    ],
)
@pytest.mark.parametrize("table", ["data", "eval.data"])
def test_below_a_free_table_a_flag_is_read_as_toml_and_what_is_not_toml_stays_text(table, text, value):
    flags = [f"--{table}.options.x={text}"]
    config = make(flags, data=GYM, eval={"data": GYM}, reward={"kind": "dataset"})
    found = (config.data if table == "data" else config.eval.data).options["x"]
    assert (found, type(found)) == (value, type(value))


def test_a_table_and_a_value_for_one_option_are_refused():
    assert "data.options" in refusal({"data.options": "3", "data.options.x": 1}, data=GYM)


def test_a_variant_can_be_chosen_and_filled_by_flags():
    config = make(["--reward.kind=number", "--tolerance=0.5", "--eval.data.kind=jsonl", "--eval.data.path=x"])
    assert (config.reward.kind, config.reward.tolerance) == ("number", 0.5)
    assert config.eval.data.path == "x"


def test_evaluation_in_the_file_can_be_taken_back_by_an_override():
    evaluated = {"data": {"kind": "jsonl", "path": "x"}}
    assert make(eval=evaluated).eval.data.path == "x"
    assert make(["--eval.data", "none"], eval=evaluated).eval.data is None


def test_overrides_of_sft_know_the_options_of_sft():
    assert parse_flags(SFTConfig, ["--batch-size", "8"]) == {"batch_size": "8"}
    with pytest.raises(ConfigError, match="is not an option"):
        make_config(SFTConfig, {"model": {"path": "m"}, "data": {"path": "d"}}, {"group_size": 4}, file="f")
