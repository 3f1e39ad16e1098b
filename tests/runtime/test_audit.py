"""strop audit: every option acts or is refused, in every preset, every example and every kind; one that is dead is found."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands.small_runs import small_once, strop

from strop.config import PRESETS, TrainConfig, load_config, make_config, tree
from strop.runtime.audit import audit

ROOT = Path(__file__).parents[2]
BASE = {
    "model": {"path": "nowhere"},
    "data": {"kind": "jsonl", "path": "nowhere.jsonl"},
    "reward": {"kind": "exact"},
    "rollout": {"group_size": 4},
}
# Tables that idle together are switched on; kinds that stand for themselves are looked at by every_kind.
EVERYTHING = {
    "model": {"path": "nowhere"},
    "data": {"kind": "reasoning_gym", "name": "chain_sum"},
    "reward": {"kind": "dataset"},
    "algorithm": {
        "updates_per_batch": 2,
        "policy_loss": {"kind": "ppo_clip", "eps_clip_c": 3.0},
        "kl": {"coef": 0.01, "target": 0.1},
        "correction": {"kind": "truncate"},
        "entropy_target": 1.0,
    },
    "eval": {"data": {"kind": "reasoning_gym", "name": "chain_sum"}},
    "run": {"checkpoint_every_steps": 50},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


def dead(findings):
    return [f"{f.path} ({f.variant})" for f in findings if f.verdict == "DEAD"]


@pytest.mark.parametrize("preset", PRESETS)
def test_no_option_of_a_preset_is_dead(preset):
    config = make_config(
        TrainConfig, BASE | {"algorithm": {"preset": preset, "updates_per_batch": 2}}, {}, file="x.toml"
    )
    findings = list(audit(config, only="algorithm"))
    assert dead(findings) == []
    of_preset = [f for f in findings if f.origin.startswith("preset") and f.verdict == "acts"]
    assert any(f.path.startswith("algorithm.policy_loss") for f in of_preset)
    assert any("loss" in f.changes or "update" in f.changes for f in of_preset)


@pytest.mark.parametrize("example", ["quickstart/cispo.toml", "smollm2-sums/config.toml"])
def test_no_option_of_an_example_is_dead(example):
    assert dead(audit(load_config(ROOT / "examples" / example))) == []


def test_every_option_there_is_acts_somewhere_and_none_is_accepted_without_acting():
    config = make_config(TrainConfig, EVERYTHING, {}, file="x.toml")
    findings = list(audit(config, every_kind=True))
    in_reward = {"kl": {"coef": 0.01}, "advantage": {"kind": "reinforce_plus_plus"}, "updates_per_batch": 2}
    config = make_config(TrainConfig, BASE | {"algorithm": in_reward}, {}, file="x.toml")
    findings += audit(config, only="algorithm")
    assert dead(findings) == []
    acting = {f.path for f in findings if f.verdict == "acts"}
    one_value = {f.path for f in findings if f.verdict == "one value"}
    silent = set(tree.paths(TrainConfig)) - acting - one_value
    # Of [data] other kinds cannot stand beside the dataset's scorer; the examples, with files, show these.
    assert {path for path in silent if not path.startswith(("data.", "eval.data."))} == set()


def test_the_command_prints_what_moved_and_ends_well(small):
    done = strop("audit", small.train, "--only", "algorithm.policy_loss")
    assert done.code == 0, done.err
    row = next(line for line in done.out.splitlines() if line.startswith("algorithm.policy_loss.eps_clip "))
    assert row.split()[1:3] == ["0.2", "0"]
    assert row.split()[-1] == "acts"
    assert "0 dead" in done.out


def test_a_table_that_is_not_there_is_refused(small):
    done = strop("audit", small.train, "--only", "algoritm")
    assert done.code == 2
    assert "--only must name a table or an option of this config, got 'algoritm'" in done.err


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


@pytest.mark.parametrize(
    "file, after, option",
    [
        ("training.py", "    beta1: float", "trainer.boldness"),
        ("policy_loss.py", '    kind: Literal["cispo"] = "cispo"\n', "algorithm.policy_loss.boldness"),
        ("sampling.py", "    prompts_per_step: int", "rollout.boldness"),
    ],
)
def test_an_option_that_is_added_and_never_read_is_found(small, tmp_path, file, after, option):
    """The founding case. It is in no list; the audit finds it in the tree."""
    shutil.copytree(ROOT / "strop", tmp_path / "strop", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "strop/config" / file
    text = path.read_text()
    planted = "    boldness: float = Field(default=0.5, ge=0)\n"
    place = text.index(after) + (len(after) if after.endswith("\n") else 0)
    path.write_text(text[:place] + planted + text[place:])
    if "policy_loss" in option:  # the binding of options to functions refuses it even earlier: let it pass there
        binding = tmp_path / "strop/algorithms/binding.py"
        binding.write_text(binding.read_text().replace('- {"kind"}', '- {"kind", "boldness"}'))
    table, _, _ = option.rpartition(".")
    command = [sys.executable, "-m", "strop.cli", "audit", str(small.train), "--only", table]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
    flags = ["--algorithm.policy_loss.kind", "cispo"] if "policy_loss" in option else []
    done = subprocess.run([*command, *flags], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert f"these options move nothing: {option}\n" in done.stderr
