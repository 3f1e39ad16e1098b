"""strop audit of everything: every option of every kind acts or is refused; an option that is added is audited here unasked."""

import pytest
from rank_processes import forked_ranks  # noqa: F401 - a fixture of this file
from runtime.audited import BASE, EVERYTHING, FILTERED, failures

from strop.config import TrainConfig, make_config, tree
from strop.runtime.audit import audit

pytestmark = pytest.mark.long


def test_every_option_there_is_acts_somewhere_and_none_is_accepted_without_acting():
    config = make_config(TrainConfig, EVERYTHING, {}, file="x.toml")
    findings = list(audit(config, every_kind=True))
    in_reward = {
        "likelihood_coef": 0.1,
        "kl": {"coef": 0.01},
        "advantage": {"kind": "reinforce_plus_plus"},
        "updates_per_batch": 2,
    }
    config = make_config(TrainConfig, BASE | {"algorithm": in_reward}, {}, file="x.toml")
    findings += audit(config, only="algorithm")
    config = make_config(TrainConfig, FILTERED | {"lora": {"rank": 2}}, {}, file="x.toml")
    for table in ("filter", "rollout", "lora"):
        findings += audit(config, only=table)
    config = make_config(TrainConfig, BASE | {"trainer": {"num_processes": 2}}, {}, file="x.toml")
    findings += audit(config, only="trainer.process_timeout_s")
    for teacher, only in (
        ("a folder", ""),
        ("http://nowhere:1", ".request_timeout_s"),
        ("http://nowhere:1", ".num_retries"),
    ):
        config = make_config(TrainConfig, BASE | {"distillation": {"teacher": teacher}}, {}, file="x.toml")
        findings += audit(config, only=f"distillation{only}")
    for kind, name, place in (("vllm", "addresses", ["http://nowhere:1"]), ("sglang", "router", "http://nowhere:1")):
        served = {"engine": {"kind": kind, name: place}}
        findings += audit(make_config(TrainConfig, BASE | served, {}, file="x.toml"), only=f"engine.{name}")
    ahead = {"rollout": {"group_size": 4, "max_off_policy_steps": 1, "streaming": True}}
    for name in ("streaming", "mask_older_tokens"):
        findings += audit(make_config(TrainConfig, BASE | ahead, {}, file="x.toml"), only=f"rollout.{name}")
    assert failures(findings) == []
    acting = {f.path for f in findings if f.verdict in ("acts", "one value", "cannot act here")}
    silent = set(tree.paths(TrainConfig)) - acting
    # An evaluation takes all prompts, whatever their order; [data] has the option from the same class. A critic, guards,
    # named sets and the trainer megatron have audits of their own.
    elsewhere = ("critic.", "guards.", "eval.sets.", "trainer.pipeline_parallel", "trainer.distributed_optimizer")
    assert {path for path in silent if not path.startswith(elsewhere)} == {
        "eval.data.shuffle",
        "eval.data.source_weights",
    }
