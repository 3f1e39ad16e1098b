"""A name that strop does not have is answered with the one that was meant, also where it comes from another framework."""

import pytest

from strop.config import SFTConfig, TrainConfig, make_config, tree
from strop.config.foreign_names import OPTION_OF
from strop.types import ConfigError

VALID = {"model": {"path": "m"}, "data": {"kind": "jsonl", "path": "d"}, "reward": {"kind": "exact"}}


def _answer(name, value=1):
    with pytest.raises(ConfigError) as caught:
        make_config(TrainConfig, VALID, {name: value}, file="run.toml")
    return str(caught.value)


def test_what_other_frameworks_call_an_option_leads_to_an_option_there_is():
    assert set(OPTION_OF.values()) <= set(tree.paths(TrainConfig))


def test_no_name_of_another_framework_hides_one_of_strop_s():
    ours = {leaf.name for root in (TrainConfig, SFTConfig) for leaf in tree.leaves(root)} - {
        "batch_size"
    }  # of strop sft
    assert ours & set(OPTION_OF) == set()


@pytest.mark.parametrize(
    "name, says",
    [
        ("kl_loss_coef", "The option for it here is algorithm.kl.coef."),
        ("n_samples_per_prompt", "The option for it here is rollout.group_size."),
        ("num_generations", "The option for it here is rollout.group_size."),
        ("rollout.rollout_batch_size", "The option for it here is rollout.prompts_per_step."),
        ("use_tis", "The option for it here is algorithm.correction.kind."),
        ("learning_rate", "The option for it here is trainer.lr."),
        ("no_shuffle", "Write data.shuffle or eval.data.shuffle with the value false."),
        ("GROUP_SIZE", "The nearest option is rollout.group_size."),
        ("trainer.LR", "The nearest option is trainer.lr."),
        ("resume", "--resume is no option of a config and no flag here: it is one of strop train"),
        ("json", "it is one of strop eval."),
    ],
)
def test_the_answer_names_what_was_meant(name, says):
    assert says in _answer(name)


@pytest.mark.parametrize(
    "tables, says",
    [
        ({"rollout": {"group_size": "4"}}, "rollout.group_size must be a whole number, got the text '4'."),
        ({"trainer": {"lr": "1e-3"}}, "trainer.lr must be a number, got the text '1e-3'."),
        ({"trainer": {"lr": True}}, "trainer.lr must be a number, got true."),
        ({"rollout": {"stop_token_ids": [True]}}, "rollout.stop_token_ids.0 must be a whole number, got true."),
        ({"rollout": {"stop_token_ids": ["4"]}}, "rollout.stop_token_ids.0 must be a whole number, got the text '4'."),
        ({"rollout": {"stop_token_ids": 4}}, "rollout.stop_token_ids must be a list such as [1, 2], got 4."),
        ({"eval": {"greedy": 1}}, "eval.greedy must be true or false, got the number 1."),
        ({"eval": {"greedy": "yes"}}, "eval.greedy must be true or false, got the text 'yes'."),
        ({"model": {"path": 3}}, "model.path must be text, got 3."),
    ],
)
def test_in_a_file_a_value_is_of_the_type_that_it_is_written_as(tables, says):
    with pytest.raises(ConfigError) as caught:
        make_config(TrainConfig, VALID | tables, {}, file="run.toml")
    assert says in str(caught.value)


def test_a_flag_is_text_and_is_read_as_what_its_option_takes():
    flags = {"group_size": "4", "lr": "1e-3", "data.shuffle": "false", "algorithm.kl.coef": "0"}
    config = make_config(TrainConfig, VALID, flags, file="run.toml")
    found = (config.rollout.group_size, config.trainer.lr, config.data.shuffle, config.algorithm.kl.coef)
    assert found == (4, 1e-3, False, 0.0)
    assert type(make_config(TrainConfig, VALID, {"model.path": "x"}, file="run.toml").model.path) is str
