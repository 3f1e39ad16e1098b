"""Steps that a run never reaches, the run's folder, and a config that was given to another command than its own."""

import pytest

from strop.config import SFTConfig, TrainConfig, load_config, make_config, tree
from strop.types import ConfigError

TRAIN = {"model": {"path": "m"}, "data": {"kind": "jsonl", "path": "d"}, "reward": {"kind": "exact"}}
TRAIN_FILE = '[model]\npath = "m"\n[data]\nkind = "jsonl"\npath = "d"\n[reward]\nkind = "exact"\n'
SFT_FILE = '[model]\npath = "m"\n[data]\npath = "d"\nbatch_size = 8\n'


def make(overrides):
    return make_config(TrainConfig, TRAIN, overrides, file="run.toml")


def warnings_of(config):
    return [text for _, table in tree.walk(config) for text in table.warnings()]


WAITING = [
    # option, the first value of which the run of 20 steps sees nothing, and what is said then
    ({"eval.data": {"kind": "jsonl", "path": "e"}}, "eval.every_steps", 20, "before and after"),
    ({}, "run.checkpoint_every_steps", 21, "the one at the end"),
    ({"algorithm.kl.coef": 0.1}, "algorithm.kl.refresh_steps", 20, "no step learns against a refreshed reference"),
]


@pytest.mark.parametrize("more, option, first, consequence", WAITING)
def test_an_option_that_waits_for_a_step_after_the_last_is_warned_of_with_both_values(more, option, first, consequence):
    (text,) = warnings_of(make({**more, option: first, "run.num_steps": 20}))
    assert text.startswith(f"{option} = {first} is ")
    assert "run.num_steps = 20: " in text
    assert consequence in text
    assert warnings_of(make({**more, option: first - 1, "run.num_steps": 20})) == []


TOO_SHORT = [
    # what cannot act in so short a run, the run, and one that is long enough
    ({"trainer.lr_schedule": "cosine"}, {"run.num_steps": 1}, {"run.num_steps": 2}),
    ({"trainer.lr_schedule": "linear", "trainer.warmup_steps": 3}, {"run.num_steps": 4}, {"run.num_steps": 5}),
    ({"trainer.beta1": 0.5}, {"run.num_steps": 1}, {"run.num_steps": 2}),
    ({"trainer.beta2": 0.5}, {"run.num_steps": 1}, {"run.num_steps": 2}),
    ({"trainer.warmup_steps": 1}, {}, {"trainer.lr_schedule": "linear"}),
    ({"algorithm.kl.target": 0.1, "algorithm.kl.coef": 0.1}, {"run.num_steps": 1}, {"run.num_steps": 2}),
    ({"algorithm.entropy_target": 1.0}, {"run.num_steps": 1}, {"run.num_steps": 2}),
    ({"run.keep_checkpoints": 5, "run.checkpoint_every_steps": 25}, {"run.num_steps": 100}, {"run.num_steps": 101}),
]


@pytest.mark.parametrize("option, short, long", TOO_SHORT, ids=[next(iter(option)) for option, _, _ in TOO_SHORT])
def test_an_option_for_which_the_run_has_too_few_steps_is_warned_of(option, short, long):
    (text,) = warnings_of(make(option | short))
    assert text.startswith(next(iter(option)))
    assert warnings_of(make(option | long)) == []


def test_a_schedule_that_a_run_of_strop_sft_is_too_short_for_is_warned_of():
    values = {"model": {"path": "m"}, "data": {"path": "d"}}
    short, long = ({"trainer.lr_schedule": "linear", "run.num_steps": n} for n in (1, 2))
    (text,) = warnings_of(make_config(SFTConfig, values, short, file="sft.toml"))
    assert text.startswith("trainer.lr_schedule = linear is the same as constant")
    assert warnings_of(make_config(SFTConfig, values, long, file="sft.toml")) == []


ROUNDS_TO_NOTHING = [
    ("trainer.lr", 1e-13, 1e-12),
    ("trainer.max_grad_norm", 1e-10, 1e-9),
    ("trainer.weight_decay", 1e-13, 1e-12),
    ("algorithm.kl.coef", 1e-13, 1e-12),
    ("algorithm.entropy_coef", -1e-13, -1e-12),
    ("rollout.temperature", 9e-4, 1e-3),
]


@pytest.mark.parametrize("option, nothing, least", ROUNDS_TO_NOTHING)
def test_a_value_that_rounds_to_nothing_is_refused(option, nothing, least):
    with pytest.raises(ConfigError, match=rf"^{option} must be .*got {nothing:g}"):
        make({option: nothing})
    make({option: least})


@pytest.mark.parametrize(
    "more, option, value",
    [
        ({}, "algorithm.veto_ratio", 1.0),  # a ratio of 1 is that of a sampler without error
        (
            {"algorithm.policy_loss.kind": "cispo", "algorithm.updates_per_batch": 2},
            "algorithm.policy_loss.eps_clip",
            7,
        ),
    ],
)
def test_a_bound_that_no_ratio_could_be_on_the_right_side_of_is_refused(more, option, value):
    with pytest.raises(ConfigError, match=rf"^{option} must be less than .*1, got {value}"):
        make({**more, option: value})


@pytest.mark.parametrize("name, value", [("temperature", 0.7), ("top_p", 0.9)])
def test_options_of_a_distribution_that_keeps_one_token_are_refused(name, value):
    held_out = {"eval.data": {"kind": "jsonl", "path": "e"}}
    with pytest.raises(ConfigError, match=rf"^eval\.{name} = {value} cannot act with eval\.top_k = 1"):
        make({**held_out, "eval.top_k": 1, f"eval.{name}": value})
    make({**held_out, "eval.top_k": 2, f"eval.{name}": value})


def test_the_order_of_one_prompt_is_refused():
    with pytest.raises(ConfigError, match=r"^data\.shuffle = False cannot act with max_prompts = 1"):
        make({"data.max_prompts": 1, "data.shuffle": False})
    tasks = {"kind": "reasoning_gym", "name": "chain_sum", "shuffle": False}
    with pytest.raises(ConfigError, match=r"^data\.shuffle = False cannot act with size = 1"):
        make_config(TrainConfig, TRAIN | {"data": tasks | {"size": 1}}, {}, file="run.toml")
    make_config(TrainConfig, TRAIN | {"data": tasks | {"size": 2}}, {}, file="run.toml")


def test_a_config_of_strop_sft_is_known_by_what_it_lacks_too(tmp_path):
    path = tmp_path / "sft.toml"
    path.write_text('[model]\npath = "m"\n[data]\npath = "d"\n')
    with pytest.raises(ConfigError, match=r"sft\.toml is a config of strop sft: .*strop audit --sft"):
        load_config(path)


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
