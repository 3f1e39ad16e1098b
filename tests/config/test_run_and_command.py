"""Steps that a run never reaches, the run's folder, and a config that was given to another command than its own."""

import pytest

from strop.config import TrainConfig, load_config, make_config, tree
from strop.types import ConfigError

TRAIN = {"model": {"path": "m"}, "data": {"kind": "jsonl", "path": "d"}, "reward": {"kind": "exact"}}
TRAIN_FILE = '[model]\npath = "m"\n[data]\nkind = "jsonl"\npath = "d"\n[reward]\nkind = "exact"\n'
SFT_FILE = '[model]\npath = "m"\n[data]\npath = "d"\nbatch_size = 8\n'


def make(overrides):
    return make_config(TrainConfig, TRAIN, overrides, file="run.toml")


def warnings_of(config):
    return [text for _, table in tree.walk(config) for text in table.warnings()]


WAITING = [
    ({"eval.data": {"kind": "jsonl", "path": "e"}}, "eval.every_steps", "before and after"),
    ({}, "run.checkpoint_every_steps", "the one at the end"),
    ({"algorithm.kl.coef": 0.1}, "algorithm.kl.refresh_steps", "never refreshed"),
]


@pytest.mark.parametrize("more, option, consequence", WAITING)
def test_an_option_that_waits_for_a_step_after_the_last_is_warned_of_with_both_values(more, option, consequence):
    (text,) = warnings_of(make({**more, option: 21, "run.num_steps": 20}))
    assert text.startswith(f"{option} = 21 is above run.num_steps = 20: ")
    assert consequence in text
    assert warnings_of(make({**more, option: 20, "run.num_steps": 20})) == []


@pytest.mark.parametrize("folder", ["x/{nam}", "{}", "{name", "name}", "{name}/{step}", "{ name }", "{{name}}"])
def test_braces_in_the_run_folder_that_nothing_replaces_are_refused(folder):
    with pytest.raises(ConfigError) as caught:
        make({"run.folder": folder})
    assert str(caught.value).startswith(f"run.folder must have no braces but {{name}}, got {folder!r}: ")


@pytest.mark.parametrize("folder", ["", "  ", "a\0b"])
def test_a_run_folder_that_is_no_path_is_refused(folder):
    with pytest.raises(ConfigError, match=r"^run\.folder must be the path of a folder, got '"):
        make({"run.folder": folder})


def test_the_name_of_the_file_may_stand_in_the_folder_more_than_once():
    assert str(make({"run.folder": "{name}/a-{name}"}).folder) == "run/a-run"


@pytest.mark.parametrize(
    "option, value",
    [
        ("trainer.num_threads", 100_000),  # torch would crash without a word
        ("engine.max_sequences", 10**12),
        ("trainer.lr", 3e38),
        ("algorithm.policy_loss.eps_clip_high", 1e300),
        ("algorithm.entropy_coef", -1e300),
    ],
)
def test_a_size_that_torch_could_not_compute_with_is_refused(option, value):
    with pytest.raises(ConfigError, match=rf"^{option} must be "):
        make({option: value, "algorithm.updates_per_batch": 2})


def in_eval(overrides):
    held_out = {"eval": {"data": {"kind": "jsonl", "path": "e"}}, "run": {"num_steps": 7}}
    return make_config(TrainConfig, TRAIN | held_out, overrides, file="run.toml", is_eval=True)


@pytest.mark.parametrize(
    "option, value",
    [
        ("rollout.temperature", 0.5),
        ("rollout.group_size", 4),
        ("algorithm.kl.coef", 0.1),
        ("trainer.lr", 0.1),
        ("run.num_steps", 3),
        ("data.max_prompts", 3),
        ("eval.every_steps", 3),
    ],
)
def test_a_flag_that_only_training_reads_is_refused_in_eval(option, value):
    with pytest.raises(ConfigError) as caught:
        in_eval({option: value})
    assert str(caught.value).startswith(f"{option} = {value} cannot act in strop eval")
    make({"eval.data": {"kind": "jsonl", "path": "e"}, option: value})


def test_flags_that_act_in_eval_are_taken_and_so_is_what_the_file_says_of_training():
    flags = {"seed": 1, "model.path": "x", "max_prompts": 3, "num_samples": 2, "max_sequences": 8, "num_threads": 1}
    config = in_eval(flags | {"rollout.max_response_tokens": 9, "stop_token_ids": [4], "reward.strip": False})
    assert (config.run.num_steps, config.eval.data.max_prompts, config.trainer.num_threads) == (7, 3, 1)


@pytest.fixture
def refusal(tmp_path):
    def load(text, command, **overrides):
        path = tmp_path / "run.toml"
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config(path, overrides, command=command)
        return str(caught.value).removeprefix(f"{path} ")

    return load


@pytest.mark.parametrize(
    "text, command, message",
    [
        (SFT_FILE, "train", "is a config of strop sft: data.batch_size is an option of it alone. Use strop sft, or"),
        (SFT_FILE, "eval", "is a config of strop sft: data.batch_size is an option of it alone. strop eval takes"),
        (TRAIN_FILE, "sft", "is a config of strop train: reward.kind is an option of it alone. Use strop train, or"),
    ],
)
def test_a_config_of_another_command_is_said_to_be_that_in_one_line(refusal, text, command, message):
    found = refusal(text, command)
    assert found.startswith(message)
    assert "\n" not in found
    assert refusal(text, command, no_such_option=1) == found


def test_a_faulty_config_of_the_command_itself_keeps_its_own_message(refusal):
    assert "batch_size is an option" not in refusal(TRAIN_FILE + "[data.more]\n[foo]\n", "train")
    both = TRAIN_FILE.replace('kind = "jsonl"', 'kind = "jsonl"\nbatch_size = 8')
    assert refusal(both, "train").startswith("data.batch_size is not an option here.")
    assert refusal(SFT_FILE.replace("8", "0"), "sft").startswith("data.batch_size must be ")
