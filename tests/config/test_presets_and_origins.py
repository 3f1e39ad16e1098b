"""Presets, the order of layers, origins, and a resolved config that is a config again."""

import tomllib

import pytest

from strop.config import PRESETS, SFTConfig, TrainConfig, make_config, to_toml, tree
from strop.config.overrides import parse_flags
from strop.types import ConfigError


def make(algorithm=None, flags=(), **more):
    values = {"model": {"path": "m"}, "data": {"kind": "jsonl", "path": "d"}, "reward": {"kind": "exact"}}
    values |= {"algorithm": algorithm or {}} | more
    overrides = flags if isinstance(flags, dict) else parse_flags(TrainConfig, flags)
    return make_config(TrainConfig, values, overrides, file="run.toml")


def sft(**more):
    return make_config(SFTConfig, {"model": {"path": "m"}, "data": {"path": "d"}} | more, {}, file="sft.toml")


# ---- presets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "preset, loss, normalize_std, coef, reduction",
    [
        (
            "grpo",
            {"kind": "ppo_clip", "eps_clip": 0.2, "eps_clip_high": None, "eps_clip_c": None},
            True,
            0.04,
            "sequence_mean",
        ),
        (
            "dr_grpo",
            {"kind": "ppo_clip", "eps_clip": 0.2, "eps_clip_high": None, "eps_clip_c": None},
            False,
            0.0,
            "constant_length",
        ),
        ("cispo", {"kind": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0}, True, 0.0, "token_mean"),
    ],
)
def test_a_preset_expands_to_the_settings_of_its_paper(preset, loss, normalize_std, coef, reduction):
    algorithm = make({"preset": preset}).algorithm
    assert algorithm.policy_loss.model_dump() == loss
    assert algorithm.advantage.normalize_std is normalize_std
    assert algorithm.kl.coef == coef
    assert algorithm.reduction == reduction


def test_every_preset_loads():
    for preset in PRESETS:
        assert make({"preset": preset}).algorithm.preset == preset


def test_what_is_set_beside_a_preset_wins():
    config = make(
        {"preset": "cispo", "policy_loss": {"eps_clip_high": 2.0}, "updates_per_batch": 2}, ["--reduction=prompt_mean"]
    )
    assert config.algorithm.policy_loss.eps_clip_high == 2.0
    assert config.algorithm.policy_loss.eps_clip == 1.0
    assert config.algorithm.reduction == "prompt_mean"


def test_a_kind_changed_beside_a_preset_keeps_nothing_of_the_table():
    algorithm = make({"preset": "cispo", "policy_loss": {"kind": "ppo_clip"}}).algorithm
    assert algorithm.policy_loss.model_dump() == {
        "kind": "ppo_clip",
        "eps_clip": 0.2,
        "eps_clip_high": None,
        "eps_clip_c": None,
    }
    assert algorithm.reduction == "token_mean"


def test_the_kl_estimator_beside_a_preset_keeps_the_coefficient():
    # kl.kind chooses an estimator, not another table: coef stays 0.04
    kl = make({"preset": "grpo", "kl": {"kind": "k2"}}).algorithm.kl
    assert (kl.coef, kl.kind) == (0.04, "k2")


def test_a_preset_on_the_command_line_replaces_the_one_of_the_file():
    config = make({"preset": "grpo"}, ["--preset", "cispo"])
    assert config.algorithm.policy_loss.kind == "cispo"
    assert config.algorithm.kl.coef == 0.0
    assert config.algorithm.preset == "cispo"


@pytest.mark.parametrize("word", ["none", None])
def test_a_preset_can_be_taken_back(word):
    config = make({"preset": "grpo"}, {"algorithm.preset": word})
    assert config.algorithm.preset is None
    assert config.algorithm.kl.coef == 0.0
    assert not any(origin.startswith("preset") for origin in config.origins.values())


@pytest.mark.parametrize(
    "flags", [["--advantage-estimator", "cispo"], ["--advantage_estimator=cispo"], ["--preset=cispo"]]
)
def test_presets_go_by_the_flag_that_users_of_slime_know(flags):
    assert make(flags=flags).algorithm.policy_loss.kind == "cispo"


def test_an_unknown_preset_is_refused_with_those_there_are():
    names = (
        "grpo, dr_grpo, dapo, cispo, gspo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, sapo, gmpo, topr, "
        "ppo, vapo"
    )
    with pytest.raises(ConfigError, match=rf"algorithm\.preset must be one of {names}, got 'gspoo'"):
        make({"preset": "gspoo"})


# ---- origins --------------------------------------------------------------------------------------------------------


def test_the_origin_of_every_value_is_kept():
    config = make({"preset": "grpo", "kl": {"coef": 0.1}}, ["--num-steps", "7"])
    assert config.origins["algorithm.kl.coef"] == "run.toml"
    assert config.origins["algorithm.kl.kind"] == "preset grpo"
    assert config.origins["run.num_steps"] == "command line"
    assert config.origins["model.path"] == "run.toml"
    assert "seed" not in config.origins


def test_every_origin_belongs_to_an_option_of_the_config():
    config = make({"preset": "cispo", "policy_loss": {"kind": "ppo_clip"}})
    assert set(config.origins) <= set(tree.values(config))
    assert config.origins["algorithm.policy_loss.kind"] == "run.toml"
    assert "algorithm.policy_loss.eps_clip" not in config.origins


def test_overrides_win_over_the_file_and_the_file_over_the_preset():
    config = make({"preset": "grpo", "kl": {"coef": 0.5}}, {"algorithm.kl.coef": 0.7})
    assert config.algorithm.kl.coef == 0.7
    assert make({"preset": "grpo", "kl": {"coef": 0.5}}).algorithm.kl.coef == 0.5


# ---- the resolved config --------------------------------------------------------------------------------------------

RESOLVED = {
    "defaults": lambda: make(),
    "grpo": lambda: make({"preset": "grpo"}),
    "dr_grpo": lambda: make({"preset": "dr_grpo"}),
    "cispo": lambda: make({"preset": "cispo"}),
    "another kind beside a preset": lambda: make({"preset": "cispo", "policy_loss": {"kind": "ppo_clip"}}),
    "cispo beside grpo": lambda: make({"preset": "grpo", "policy_loss": {"kind": "cispo"}}),
    "no penalty beside grpo": lambda: make({"preset": "grpo", "kl": {"coef": 0.0}}),
    "dr_grpo with deviation": lambda: make({"preset": "dr_grpo", "advantage": {"normalize_std": True}}),
    "two updates": lambda: make(flags=["--updates-per-batch=2", "--eps-clip-high=0.28", "--eps-clip-c=3"]),
    "none, inf, lists": lambda: make(
        flags=["--max-grad-norm=inf", "--max-logprob-gap=inf", "--stop-token-ids=[1,106]", "--data.max_prompts=none"]
    ),
    "text that wants escapes": lambda: make(
        flags={"data.system_prompt": 'a "b"\\\n# c = [1]\t\u2212 é', "model.path": "none"}
    ),
    "held-out data": lambda: make(
        eval={"num_samples": 0, "data": {"kind": "reasoning_gym", "name": "chain_sum", "options": {"min_terms": 2}}}
    ),
    "a free table": lambda: make(
        data={"kind": "reasoning_gym", "name": "x", "options": {"a": 1, "b": [1, 2], "c": {"d": "e"}}},
        reward={"kind": "dataset"},
    ),
    "a function": lambda: make(reward={"kind": "function", "function": "a.b:c", "batched": True}),
    "small and large numbers": lambda: make(flags=["--adam-eps=3e-300", "--std-eps=1e-06", "--coef=1e22"]),
    "sft": lambda: sft(),
    "sft with a trainer": lambda: sft(trainer={"warmup_steps": 3}),
}


@pytest.mark.parametrize("name", RESOLVED)
def test_a_resolved_config_loads_again_and_is_equal(name):
    config = RESOLVED[name]()
    text = to_toml(config)
    again = make_config(type(config), tomllib.loads(text), {}, file="config.toml")
    expected = config.model_dump()
    expected["run"]["folder"] = str(config.folder)  # {name} is put in: the file is called config.toml and is that run's
    assert again.model_dump() == expected
    assert type(again.run) is type(config.run)
    third = make_config(type(config), tomllib.loads(to_toml(again)), {}, file="config.toml")
    assert third.model_dump() == expected


@pytest.mark.parametrize("name", RESOLVED)
def test_a_resolved_config_has_every_option(name):
    config = RESOLVED[name]()
    written = tomllib.loads(to_toml(config))
    for path in tree.values(config):
        table = written
        for part in path.split("."):
            assert part in table, path
            table = table[part]


def test_the_origin_stands_beside_each_value():
    lines = to_toml(make({"preset": "grpo", "kl": {"coef": 0.1}}, ["--num-steps", "7"])).splitlines()
    assert "coef = 0.1 # run.toml" in lines
    assert 'kind = "k3" # preset grpo' in lines
    assert "num_steps = 7 # command line" in lines
    assert "seed = 0 # default" in lines


def test_a_file_with_an_odd_name_does_not_break_the_resolved_config():
    values = {"model": {"path": "m"}, "data": {"kind": "jsonl", "path": "d"}, "reward": {"kind": "exact"}}
    config = make_config(TrainConfig, values, {}, file="odd\nseed = 5\n#.toml")
    assert tomllib.loads(to_toml(config))["seed"] == 0


# ---- strop sft ------------------------------------------------------------------------------------------------------


def test_an_option_of_the_trainer_does_not_change_the_learning_rate_of_sft():
    assert sft().trainer.lr == 1e-5
    assert sft(trainer={"beta1": 0.8}).trainer.lr == 1e-5


def test_sft_refuses_what_cannot_act():
    with pytest.raises(ConfigError, match=r"run\.save_rollouts is not an option here"):
        sft(run={"save_rollouts": False})
    with pytest.raises(ConfigError, match="algorithm is not an option here"):
        sft(algorithm={"preset": "grpo"})
