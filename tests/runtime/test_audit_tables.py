"""strop audit of tables that the other audits leave idle: guards, named sets, strop sft."""

import pytest
from rank_processes import forked_ranks  # noqa: F401 - a fixture of this file
from runtime.audited import BASE, GUARDED, failures

from strop.config import GuardOptions, SFTConfig, TrainConfig, make_config, tree
from strop.runtime.audit import audit

pytestmark = pytest.mark.long


def test_no_option_of_guards_is_dead():
    config = make_config(TrainConfig, GUARDED, {}, file="x.toml")
    findings = list(audit(config, only="guards"))
    assert failures(findings) == []
    assert {f.path.removeprefix("guards.") for f in findings if f.verdict == "acts"} == set(GuardOptions.model_fields)


def test_every_option_of_strop_sft_acts():
    held_out = {"every_steps": 10, "data": {"path": "nowhere"}}
    values = {"model": {"path": "nowhere"}, "data": {"path": "nowhere"}, "validation": held_out}
    values |= {"run": {"checkpoint_every_steps": 10}, "lora": {"rank": 2}}
    config = make_config(SFTConfig, values, {}, file="x.toml")
    findings = {f.path: f for f in audit(config)}
    assert {path for path in tree.paths(SFTConfig) if path not in findings} == set()
    idle = {"validation.data.shuffle", "validation.data.batch_size"}  # a validation takes all at once
    idle |= {"trainer.process_timeout_s", "trainer.tensor_parallel"}  # the config is of one process, and of adapters
    assert {path for path, f in findings.items() if f.verdict not in ("acts", "one value", "cannot act here")} == idle
    assert findings["data.response_key"].changes.keys() >= {"loss", "update"}


def test_every_option_of_a_named_set_of_held_out_prompts_acts_or_is_refused():
    """Option by option, under the name that the set has."""
    held_out = {"data": {"kind": "jsonl", "path": "none.jsonl"}, "reward": {"kind": "number"}}
    config = make_config(TrainConfig, BASE | {"eval": {"sets": {"aime-24": held_out}}}, {}, file="x.toml")
    findings = {f.path: f for f in audit(config, only="eval.sets")}
    general = {tree.general(TrainConfig, path) for path in findings}
    kinds = ("jsonl", "number", None)
    wanted = {
        leaf.path for leaf in tree.leaves(TrainConfig) if leaf.path.startswith("eval.sets.") and leaf.kind in kinds
    }
    assert general == wanted
    assert {path for path in findings if not path.startswith("eval.sets.aime-24.")} == set()
    assert failures(findings.values()) == []
    silent = {path.rpartition(".")[2] for path, f in findings.items() if f.verdict not in ("acts", "one value")}
    assert silent == {"shuffle", "source_weights"}  # an evaluation takes all prompts once, whatever their order
