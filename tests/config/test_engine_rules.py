"""What an engine's options may be, and what cannot act beside what."""

import pytest

from strop.config import TrainConfig, make_config
from strop.types import ConfigError

VALID = {"model": {"path": "m"}, "data": {"kind": "jsonl", "path": "d"}, "reward": {"kind": "exact"}}


def config(kind="vllm", **engine):
    more = {name: engine.pop(name) for name in ("rollout", "lora", "trainer") if name in engine}
    more |= {"model": VALID["model"] | engine.pop("model", {})}
    return make_config(TrainConfig, VALID | more | {"engine": {"kind": kind, **engine}}, {}, file="x.toml").engine


def refusal(kind="vllm", **engine):
    with pytest.raises(ConfigError) as found:
        config(kind, **engine)
    return str(found.value)


@pytest.mark.parametrize(
    "address",
    ["10.0.0.2:8000", "http://host:8000/v1", "http://host:0", "http://host:99999", "http://me@host:1", "", "ftp://h:1"],
)
def test_an_address_that_is_none_is_refused(address):
    assert refusal(addresses=[address]).startswith("engine.addresses must be of the form http://host:port")
    assert refusal("sglang", router=address).startswith("engine.router must be of the form http://host:port")


def test_a_server_that_is_named_twice_is_refused():
    assert "engine.addresses must be different servers" in refusal(addresses=["http://a:1", "http://a:1"])
    assert config(addresses=["http://a:1", "https://b:2"]).addresses == ("http://a:1", "https://b:2")


@pytest.mark.parametrize("name, value", [("num_servers", 2), ("python", "python3"), ("server_args", ["--seed", "1"])])
def test_what_is_said_of_servers_to_start_is_refused_beside_addresses(name, value):
    assert f"engine.{name}" in refusal(addresses=["http://a:1"], **{name: value})
    assert f"engine.{name}" in refusal("sglang", router="http://a:1", **{name: value})
    assert getattr(config(**{name: value}), name) is not None


def test_the_servers_behind_a_router_are_not_named_beside_it():
    message = refusal("sglang", router="http://a:1", addresses=["http://b:1"])
    assert message.startswith(
        "engine.addresses must be [] with engine.router: the servers are those that the router names"
    )


@pytest.mark.parametrize(
    "kind, args, gpus",
    [
        ("vllm", ["--tensor-parallel-size", "4"], 4),
        ("vllm", ["-tp=2", "--seed", "7"], 2),
        ("sglang", ["--tp", "2", "--dp-size=3", "--pp-size", "2"], 12),
        ("sglang", ["--context-length", "8"], 1),
    ],
)
def test_as_many_gpus_as_a_servers_arguments_ask_for_are_kept_for_it(kind, args, gpus):
    assert config(kind, server_args=args).gpus_per_server == gpus


@pytest.mark.parametrize("name, value", [("transfer_folder", "w"), ("transfer_changes_only", True)])
@pytest.mark.parametrize("transfer", ["nccl", "ipc"])
def test_what_is_said_of_files_is_refused_where_there_are_none(name, value, transfer):
    assert "is only used with engine.transfer = files" in refusal(transfer=transfer, **{name: value})


def test_options_of_other_engines_say_where_they_belong():
    assert "SGLang decides how many sequences it samples at once" in refusal("sglang", max_sequences=8)
    assert "SGLang reads whole files" in refusal("sglang", transfer_changes_only=True)
    assert "a vLLM server draws each sample from its own seed" in refusal(deterministic=True)
    assert "is only used with engine.transfer = files" in refusal("sglang", transfer="nccl", transfer_folder="w")
    assert "vLLM decides how many sequences it samples at once" in refusal(max_sequences=8)
    assert "vLLM sizes its own cache" in refusal(max_cache_tokens=8)


@pytest.mark.parametrize(
    "name, value, why",
    [
        ("addresses", ["http://a:1"], "there is no server"),
        ("num_servers", 2, "one vLLM runs in this process; servers may be several"),
        ("num_replicas", 2, "one vLLM runs in this process; servers may be several"),
        ("server_args", ["--seed", "1"], "stands in engine_args"),
        ("max_restarts", 1, "there is no server"),
        ("transfer", "files", "weights are copied within this process"),
        ("pause_mode", "wait", "samples in flight go on with new weights"),
        ("max_sequences", 8, "engine_args takes --max-num-seqs"),
    ],
)
def test_what_makes_no_sense_with_vllm_in_this_process_says_why(name, value, why):
    message = refusal("vllm_in_process", **{name: value})
    assert f"{name} belongs to kind = " in message
    assert why in message


def test_vllm_in_this_process_is_for_one_process_and_the_first_gpu():
    message = refusal("vllm_in_process", trainer={"num_processes": 2})
    assert message.startswith("trainer.num_processes must be 1 with engine.kind = vllm_in_process, got 2")
    message = refusal("vllm_in_process", model={"device": "cuda:1"})
    assert message.startswith("model.device must be auto, cuda or cpu with engine.kind = vllm_in_process, got cuda:1")
    assert config("vllm_in_process", model={"device": "cuda"}).engine_args == ()


@pytest.mark.parametrize("kind", ["vllm", "vllm_in_process"])
def test_a_temperature_that_vllm_does_not_take_is_refused_before_anything_starts(kind):
    message = refusal(kind, rollout={"temperature": 2.5})
    assert message.startswith(f"rollout.temperature must be at most 2 with engine.kind = {kind}, got 2.5: vLLM takes")


def test_adapters_are_refused_beside_replicas_alone():
    message = refusal("torch", num_replicas=2, lora={"rank": 4})
    assert message.startswith("engine.num_replicas must be 0 with lora.rank = 4, got 2")
    assert [config(kind, lora={"rank": 4}).kind for kind in ("vllm", "sglang")] == ["vllm", "sglang"]
