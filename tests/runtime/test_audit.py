"""strop audit: every option of every preset acts or is refused; what the command prints; what is the user's."""

import contextlib
import os
import sys

import pytest
from commands.small_runs import small_once, strop
from runtime.audited import BASE, failures

from strop.config import PRESETS, CriticOptions, TrainConfig, load_config, make_config
from strop.runtime.audit import audit, runs

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.mark.parametrize("preset", PRESETS)
def test_no_option_of_a_preset_is_dead(preset):
    config = make_config(
        TrainConfig, BASE | {"algorithm": {"preset": preset, "updates_per_batch": 2}}, {}, file="x.toml"
    )
    findings = list(audit(config, only="algorithm"))
    assert failures(findings) == []
    of_preset = [f for f in findings if f.origin.startswith("preset") and f.verdict == "acts"]
    assert any(f.path.startswith("algorithm.policy_loss") for f in of_preset)
    assert any("loss" in f.changes or "update" in f.changes for f in of_preset)


def test_no_option_of_a_critic_is_dead():
    config = make_config(
        TrainConfig, BASE | {"algorithm": {"preset": "ppo", "updates_per_batch": 2}}, {}, file="x.toml"
    )
    findings = list(audit(config, only="critic"))
    assert failures(findings) == []
    assert {f.path.removeprefix("critic.") for f in findings if f.verdict == "acts"} == set(CriticOptions.model_fields)


def test_the_command_prints_what_moved_and_ends_well(small):
    done = strop("audit", small.train, "--only", "algorithm.policy_loss")
    assert done.code == 0, done.err
    row = next(line for line in done.out.splitlines() if line.startswith("algorithm.policy_loss.eps_clip "))
    assert row.split()[1:4] == ["0.2", "0.5", "loss"]
    assert row.split()[-1] == "acts"
    assert "0 dead" in done.out


def test_a_table_that_is_not_there_is_refused_before_anything_is_prepared(small, monkeypatch):
    monkeypatch.setattr(sys.modules[audit.__module__], "write_workshop", None)
    done = strop("audit", small.train, "--only", "algoritm")
    assert done.code == 2
    assert "--only must name a table or an option of this config, got 'algoritm'" in done.err
    assert "The nearest option is algorithm" in done.err


def test_a_table_may_have_a_dot_at_its_end(small):
    one, other = (strop("audit", small.train, "--only", only) for only in ("algorithm.kl", "algorithm.kl."))
    assert (one.code, one.out) == (0, other.out)
    rows = [line for line in one.out.splitlines() if line.startswith("algorithm.kl.")]
    assert f"\n{len(rows)} options: " in one.out


def test_an_option_of_another_kind_is_looked_at_with_all_and_else_named_as_one(small):
    only = ("--only", "algorithm.policy_loss.cov_low")
    done = strop("audit", small.train, *only)
    assert done.code == 2
    assert 'cov_low belongs to kind = "clip_cov"' in done.err
    assert "Add --all" in done.err
    done = strop("audit", small.train, *only, "--all")
    assert done.code == 0, done.err
    assert "with algorithm.policy_loss.kind = clip_cov" in done.out
    assert "1 options: 1 act" in done.out


def test_a_config_of_strop_sft_and_a_run_folder_are_audited(small, tmp_path):
    done = strop("audit", "--sft", small.sft, "--only", "data.batch_size")
    assert (done.code, "1 act" in done.out) == (0, True), done.err
    assert "Use strop sft" in strop("audit", small.sft).err
    assert strop("train", small.train, "--num-steps", "1", "--run.folder", tmp_path / "run").code == 0
    done = strop("audit", tmp_path / "run", "--only", "rollout.group_size")
    assert (done.code, "1 act" in done.out) == (0, True), done.err


def test_an_audit_needs_neither_model_nor_data_of_the_config_and_leaves_nothing(tmp_path):
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "no/such/model"\n[data]\nkind = "jsonl"\npath = "none.jsonl"\n[reward]\nkind = "math"\n'
    )
    with contextlib.chdir(tmp_path):
        done = strop("audit", "run.toml", "--only", "rollout")
    assert done.code == 0, done.err
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_a_free_table_of_the_config_s_own_file_is_turned_as_one_option(tmp_path):
    """[reward.args] and [data.options] hold what strop has no names for."""
    reward = '[reward]\nkind = "slime"\nfunction = "none.py:f"\nreward_key = "acc"\n[reward.args]\nscale = 1\n'
    (tmp_path / "run.toml").write_text(f'[model]\npath = "m"\n[data]\nkind = "jsonl"\npath = "d"\n{reward}')
    (found,) = audit(load_config(tmp_path / "run.toml"), only="reward.args")
    assert (found.path, found.value, found.verdict) == ("reward.args", {"scale": 1}, "acts")


# ---- what is the user's and does not fit the workshop ---------------------------------------------------------------


def verdicts(values, *only, overrides=None):
    """Path to verdict of some options of a config."""
    config = make_config(TrainConfig, values, overrides or {}, file="x.toml")
    return {f.path: f.verdict for name in only for f in audit(config, only=name)}


def test_values_that_only_the_user_s_model_and_data_fit_are_replaced():
    values = BASE | {
        "model": {"path": "nowhere", "device": "cuda"},
        "data": {"kind": "reasoning_gym", "name": "arc_agi", "system_prompt": "x" * 9000, "options": {"no": "such"}},
        "rollout": {"group_size": 4, "stop_token_ids": [151643, 151645]},
    }
    only = ("rollout.stop_token_ids", "data.system_prompt", "data.options", "data.name")
    assert set(verdicts(values, *only).values()) == {"acts"}


def test_a_small_run_that_fails_by_itself_is_an_error_of_the_audit_with_its_cause(small):
    """The config's own scorer gives one number, and gdpo needs several."""
    done = strop("audit", small.exact, "--algorithm.advantage.kind", "gdpo", "--only", "reward.strip")
    assert done.code == 2
    assert "its own small run of this config ends with an error: algorithm.advantage.kind = gdpo needs" in done.err
    assert "DEAD" not in done.out


def test_what_counts_steps_is_shortened_in_the_order_that_it_stands_in():
    values = BASE | {"algorithm": {"kl": {"coef": 0.1, "refresh_steps": 10}}}
    values |= {"run": {"num_steps": 100, "checkpoint_every_steps": 50}, "trainer": {"warmup_steps": 99}}
    only = ("algorithm.kl.refresh_steps", "trainer.warmup_steps", "run.checkpoint_every_steps")
    assert set(verdicts(values, *only).values()) == {"acts"}


def test_threads_of_a_machine_with_one_core_cannot_act_there(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert verdicts(BASE, "trainer.num_threads") == {"trainer.num_threads": "cannot act here"}


@pytest.fixture
def few_scenarios(monkeypatch):
    """The ordinary run, those whose messages hold numbers of the run, and the larger one: what acts nowhere is tried in all."""
    names = ("", "losses that are not finite", "losses that jump", "early jumps", "a larger run")
    monkeypatch.setattr(runs, "SCENARIOS", tuple(scenario for scenario in runs.SCENARIOS if scenario.name in names))


IDLE = [
    ({"rollout.max_response_tokens": 1, "rollout.stop_token_ids": [3]}, "rollout.stop_token_ids"),
    ({"rollout.max_response_tokens": 1}, "algorithm.reduction"),
    (
        {"rollout.group_size": 64, "algorithm.advantage.kind": "pass_at_k", "algorithm.advantage.k": 32},
        "algorithm.advantage.success_reward",
    ),
    ({"run.num_steps": 1}, "trainer.lr_schedule"),
    ({"run.num_steps": 9, "run.checkpoint_every_steps": 9}, "run.keep_checkpoints"),
    ({"data.max_prompts": 1}, "data.shuffle"),
]


@pytest.mark.parametrize("overrides, option", IDLE, ids=[f"{option} {next(iter(more))}" for more, option in IDLE])
def test_a_default_that_cannot_act_beside_what_was_set_is_not_called_dead(few_scenarios, overrides, option):
    assert verdicts(BASE, option, overrides=overrides)[option] in ("acts", "idle")


def test_an_option_that_moves_only_metrics_or_only_words_is_idle_in_a_run_of_one_step(few_scenarios):
    overrides = {
        "run.num_steps": 1,
        "algorithm.kl.coef": 0.1,
        "algorithm.kl.target": 0.1,
        "algorithm.kl.refresh_steps": 5,
    }
    only = ("algorithm.kl.target", "algorithm.kl.horizon_steps", "algorithm.kl.refresh_steps", "trainer.beta2")
    assert set(verdicts(BASE, *only, overrides=overrides).values()) == {"idle"}
