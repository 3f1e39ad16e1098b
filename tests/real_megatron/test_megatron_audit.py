"""strop audit of the trainer megatron."""

from rank_processes import forked_ranks  # noqa: F401 - a fixture of this file
from runtime.audited import BASE, failures

from strop.config import MegatronTrainerOptions, TrainConfig, make_config
from strop.runtime.audit import audit


def test_every_option_of_the_trainer_acts():
    config = make_config(TrainConfig, BASE | {"trainer": {"kind": "megatron"}}, {}, file="x.toml")
    findings = list(audit(config, only="trainer"))
    assert failures(findings) == []
    acting = {f.path.removeprefix("trainer.") for f in findings if f.verdict == "acts"}
    assert acting == set(MegatronTrainerOptions.model_fields) - {"process_timeout_s"}
    config = make_config(TrainConfig, BASE | {"trainer": {"kind": "megatron", "num_processes": 2}}, {}, file="x.toml")
    (found,) = audit(config, only="trainer.process_timeout_s")
    assert found.verdict == "acts"
