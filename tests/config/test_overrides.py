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


def test_a_name_that_occurs_more_than_once_is_refused_with_its_paths():
    message = refusal(["--temperature", "0.5"])
    assert (
        message
        == "--temperature is ambiguous: it may be rollout.temperature or eval.temperature. Write the whole path."
    )
    assert refusal({"kind": "cispo"}).startswith("--kind is ambiguous")


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
    with pytest.raises(ConfigError, match="is not a TOML value"):
        make(["--stop-token-ids", "[1,"])
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
