"""The engine sglang, against a small server that holds to SGLang's protocol and samples by the numbers of the engine torch:
what of it is its own (test_engines_apart.py has the rest), new weights, a router, and what becomes of servers that fail."""

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest
import tiny_models
from made_requests import request
from made_servers import REQUESTS, agree, all_of, changed, drop, on, own, refuse, runner, two_of
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d

from strop.config import SGLangEngineOptions
from strop.engines.sglang.engine import SGLangEngine
from strop.engines.sglang.group_transfer import GroupTransfer
from strop.runtime.audit import engine_servers
from strop.runtime.audit.sglang_server import RouterStandIn, StandIn
from strop.runtime.audit.teacher_server import serving
from strop.types import EngineError, GuardError, ModelError, UserError, WaitError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    tiny_models.llama().save_pretrained(folder / "model")
    with engine_servers.standing(folder):
        yield folder


@pytest.fixture(scope="module")
def servers(folder):
    yield from two_of(StandIn, folder / "model")


@pytest.fixture
def sglang(server, servers, model):
    return runner(SGLangEngine, SGLangEngineOptions, servers, model)


# ---- samples ----------------------------------------------------------------------------------------------------------


def test_an_end_of_the_model_that_strop_does_not_know_is_named(sglang, folder, model):
    asked = request([3, 4], seeds=range(1, 9), length=30)
    knows = StandIn(folder / "model")
    knows.model.generation_config.eos_token_id = 2
    with serving(knows) as address:
        agree(sglang(all_of([asked]), stop=(2,), addresses=[address]), own(model, asked, stop=(2,)))
        with pytest.raises(EngineError, match="SGLang takes token 2 for an end of this model, and strop does not"):
            sglang(all_of([asked]), addresses=[address])


def test_a_server_that_gives_logprobs_at_temperature_1_alone_is_refused(sglang, folder):
    refused = pytest.raises(UserError, match="start it without SGLANG_RETURN_ORIGINAL_LOGPROB")
    with serving(StandIn(folder / "model", at_temperature=False)) as address, refused:
        sglang(all_of([request([3], temperature=0.5)]), addresses=[address])


@pytest.mark.parametrize(
    "info, options, said",
    [
        ({"enable_deterministic_inference": False}, {}, "with --enable-deterministic-inference, as"),
        ({}, {"deterministic": False}, "without --enable-deterministic-inference, as"),
        (
            {"enable_memory_saver": False, "enable_weights_cpu_backup": False},
            {"sleep": True},
            "with --enable-memory-saver and with --enable-weights-cpu-backup, as",
        ),
    ],
    ids=["seeds", "no seeds", "sleep"],
)
def test_a_server_that_was_started_otherwise_than_the_config_says_is_refused(sglang, folder, info, options, said):
    with (
        serving(StandIn(folder / "model", **info)) as address,
        pytest.raises(UserError, match=f"must be started {said}"),
    ):
        sglang(all_of(REQUESTS), addresses=[address], **options)


# ---- weights ----------------------------------------------------------------------------------------------------------


def test_after_an_update_all_servers_sample_what_the_source_would(sglang, servers, tmp_path):
    source = tiny_models.llama(7)

    async def work(engine):
        await engine.generate(REQUESTS[0])
        metrics = await engine.update_weights(source.named_parameters(), 3)
        assert len(list((tmp_path / "weights").glob("*/*"))) == 1  # the newest alone
        return await asyncio.gather(*map(engine.generate, REQUESTS)), metrics

    found, metrics = sglang(work, num=2, transfer_folder=str(tmp_path / "weights"))
    agree(found, own(source, *REQUESTS, version=3))
    assert metrics["weights_bytes"].value > 4 * sum(p.nbytes for p in source.parameters())  # twice, to two servers
    assert list((tmp_path / "weights").iterdir()) == []
    assert [(s.seen["pause retract"], s.seen["flush_cache"]) for s, _ in servers] == [(2, 2)] * 2


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_every_token_in_flight_says_which_weights_sampled_it(sglang, server, mode):
    asked = request([3], seeds=(1,), length=60)
    server.begin(token_s=0.01)

    async def work(engine):
        await engine.generate(request([3], length=1))
        flying = asyncio.create_task(engine.generate(asked))
        while server.num_sampled < 20:
            await asyncio.sleep(0.001)
        await engine.update_weights(tiny_models.llama(7).named_parameters(), 1)
        return await flying

    completions = sglang(work, pause_mode=mode)
    assert {v for c in completions for v in c.policy_versions} == ({0} if mode == "abort" else {0, 1})
    assert all(list(c.policy_versions) == sorted(c.policy_versions) for c in completions)
    assert {c.finish_reason for c in completions} == {"abort" if mode == "abort" else "length"}
    assert server.seen["flush_cache"] == (0 if mode == "in_place" else 2)


def test_no_prompt_is_read_as_weights_before_left_it(sglang, server):
    """In place nothing is flushed: each prompt is remembered under the label of the weights that read it."""

    async def work(engine):
        await engine.generate(REQUESTS[0])
        await engine.update_weights(tiny_models.llama(7).named_parameters(), 1)
        return await engine.generate(REQUESTS[0])

    agree([sglang(work, pause_mode="in_place")], own(tiny_models.llama(7), REQUESTS[0], version=1))
    assert server.seen["prompts of other weights"] == 0


def test_a_server_of_another_model_refuses_the_weights_and_says_why(sglang):
    with pytest.raises(ModelError, match=r"fit the model of SGLang server http.*Failed to update weights: The size"):
        sglang(all_of(REQUESTS), of=tiny_models.llama(intermediate_size=20))


def test_the_files_of_weights_are_a_folder_as_that_of_a_model(sglang, server, model, tmp_path):
    """What the real server reads: every *.safetensors file of a folder, under Hugging Face names."""
    held = {}

    def look(path, body, answer):
        if path == "/update_weights_from_disk":
            (file,) = Path(body["model_path"]).iterdir()
            held.update(load_file(file))
        return answer()

    server.begin(look)
    sglang(all_of(REQUESTS))
    assert {name: (t.dtype, t.tolist()) for name, t in held.items()} == {
        name: (p.dtype, p.tolist()) for name, p in model.named_parameters()
    }


class _Joins(StandIn):
    """One whose rank joins a group as SGLang's does, over gloo: by the store's prefixes of torch's own function, which would
    not make a second group of one name in one process."""

    def on_init_weights_update_group(self, body, query):
        assert body["rank_offset"] == 1
        where, size, limit = (
            f"tcp://{body['master_address']}:{body['master_port']}",
            body["world_size"],
            timedelta(seconds=60),
        )
        store, *_ = next(c10d.rendezvous(where, 1, size, timeout=limit))
        for prefix in (body["group_name"], f"{body['group_name']}/", "cpu/"):
            store = c10d.PrefixStore(prefix, store)
        self.group = c10d.ProcessGroupGloo(store, 1, size, timeout=limit)
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    def receive(self, group, into):
        options = c10d.BroadcastOptions()
        for tensor in into:
            self.group.broadcast([tensor], options).wait()
        self.seen["buckets"] += 1


def test_weights_that_are_sent_in_a_group_arrive_as_they_are(sglang, folder, monkeypatch):
    """The way over NCCL, over gloo here: several buckets, and a second update in the group that is there."""
    monkeypatch.setattr("strop.engines.sglang.group_transfer._BUCKET_BYTES", 2000)
    source = tiny_models.llama(7)

    async def work(engine):
        await engine.generate(REQUESTS[0])
        metrics = await engine.update_weights(source.named_parameters(), 1)
        return await asyncio.gather(*map(engine.generate, REQUESTS)), metrics

    joins = _Joins(folder / "model")
    with serving(joins) as address:
        found, metrics = sglang(work, addresses=[address], transfer=GroupTransfer("gloo", timeout_s=9))
    agree(found, own(source, *REQUESTS, version=1))
    assert metrics["weights_bytes"].value == 2 * sum(p.nbytes for p in source.parameters())
    assert joins.seen["buckets"] > 4


def test_a_server_that_a_group_cannot_hold_is_refused(sglang, folder):
    refused = pytest.raises(UserError, match=r"engine\.transfer must be files for SGLang server")
    with serving(StandIn(folder / "model", dp_size=2)) as address, refused:
        sglang(all_of(REQUESTS), addresses=[address], transfer=GroupTransfer("gloo", timeout_s=9))


# ---- a router ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def router(servers):
    workers = {address: stand_in for stand_in, address in servers}
    with serving(RouterStandIn(workers)) as address:
        yield address


def test_samples_go_to_the_router_and_weights_to_each_server_behind_it(sglang, servers, router, model):
    for stand_in, _ in servers:
        stand_in.begin()
    source = tiny_models.llama(7)

    async def work(engine):
        before = await asyncio.gather(*map(engine.generate, REQUESTS))
        await engine.update_weights(source.named_parameters(), 1)
        return before, await asyncio.gather(*map(engine.generate, REQUESTS))

    before, after = sglang(work, router=router)
    agree(before, own(model, *REQUESTS))
    agree(after, own(source, *REQUESTS, version=1))
    assert [(s.num_sampled > 0, s.seen["prompts of other weights"]) for s, _ in servers] == [(True, 0)] * 2


def test_a_server_behind_a_router_that_was_started_again_is_found_out(sglang, server, router):
    source, told = tiny_models.llama(7), []

    async def work(engine):
        await engine.update_weights(source.named_parameters(), 1)
        server.begin()  # the weights of its folder, under no label of this run
        found = await asyncio.gather(*map(engine.generate, REQUESTS))
        return found, await engine.update_weights(source.named_parameters(), 2)

    found, metrics = sglang(work, router=router, tell=told.append)
    agree(found, own(source, *REQUESTS, version=1))
    assert metrics["engine_restarts"].value == 1
    assert ["weights that this run did not give it" in words for words in told] == [True]


def test_a_sample_that_a_router_loses_is_asked_for_again_and_not_for_ever(sglang, servers, router, model, monkeypatch):
    monkeypatch.setattr("strop.engines.served.fleet._PATIENCE_S", (0.0,))
    servers[0][0].begin(on("/generate", drop, calls=(2,)))
    agree(sglang(all_of(REQUESTS), router=router), own(model, *REQUESTS))
    for stand_in, _ in servers:
        stand_in.begin(on("/generate", drop, calls=range(1, 100)))
    with pytest.raises(EngineError, match=r"SGLang router http\S+ was lost 3 times in a row"):
        sglang(all_of([request([3])]), router=router, max_restarts=2)


def test_a_router_without_workers_is_named_when_its_time_is_over(sglang):
    over = pytest.raises(WaitError, match=r"start_timeout_s = 0\.3 s went by in which SGLang router http")
    with serving(RouterStandIn({})) as address, over:
        sglang(all_of([request([3])]), router=address, start_timeout_s=0.3)


# ---- servers that fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/generate", "/pause_generation", "/flush_cache", "/update_weights_from_disk", "/model_info"]
)
def test_a_connection_that_is_lost_costs_no_sample_and_is_told(sglang, server, path):
    told = []
    server.begin(on(path, drop, calls=(3,) if path == "/model_info" else (2,)))

    async def work(engine):
        await engine.generate(REQUESTS[0])
        metrics = await engine.update_weights(tiny_models.llama(7).named_parameters(), 1)
        return await asyncio.gather(*map(engine.generate, REQUESTS)), metrics

    found, metrics = sglang(work, tell=told.append)
    agree(found, own(tiny_models.llama(7), *REQUESTS, version=1))
    assert metrics["engine_restarts"].value == 1
    assert ["is lost" in words for words in told] == [True]


def test_a_server_that_an_earlier_run_left_paused_goes_on(sglang, server, model):
    server.is_paused = True
    agree(sglang(all_of(REQUESTS)), own(model, *REQUESTS))


def test_a_server_that_says_other_weights_after_an_update_ends_the_run(sglang, server):
    server.begin(on("/model_info", lambda answer: {"weight_version": "default"}, calls=(2,)))
    with pytest.raises(EngineError, match=r"must hold weights .*:0:0 after its update, and says default"):
        sglang(all_of([request([3])]))


@pytest.mark.parametrize(
    "path, act, kind, said",
    [
        (
            "/generate",
            changed(lambda found: found["meta_info"].pop("output_token_logprobs")),
            EngineError,
            "a log-probability and a version with every token",
        ),
        (
            "/generate",
            changed(lambda found: found["meta_info"].pop("weight_versions")),
            EngineError,
            "a version with every token",
        ),
        ("/generate", changed(lambda found: found["output_ids"].append(3)), EngineError, "a log-probability and a"),
        (
            "/generate",
            changed(lambda found: found["meta_info"]["output_token_logprobs"][2].__setitem__(0, None)),
            GuardError,
            "not finite",
        ),
        (
            "/generate",
            changed(lambda found: found["meta_info"]["finish_reason"].update(type="stop", matched="NaN happened")),
            GuardError,
            "not finite",
        ),
        ("/generate", changed(lambda found: found.pop("meta_info")), EngineError, "not in its protocol"),
        ("/generate", refuse, UserError, "does not offer /generate, which strop needs"),
        ("/server_info", lambda answer: {"version": "0.4"}, UserError, "must be an SGLang server; its answer is not"),
        ("/pause_generation", refuse, UserError, "does not offer /pause_generation"),
    ],
    ids=["no logprobs", "no versions", "a token too many", "null", "NaN", "no words", "no path", "no info", "no pause"],
)
def test_an_answer_that_lacks_something_ends_the_run_and_says_what(sglang, server, path, act, kind, said):
    server.begin(on(path, act))
    with pytest.raises(kind) as ended:
        sglang(all_of([request([3])]))
    assert said in str(ended.value)


# ---- servers that strop starts ------------------------------------------------------------------------------------------


def test_servers_are_started_with_what_strop_needs_and_rest_while_the_trainer_works(sglang, folder, model):
    engine_servers.begin()
    python = str(folder / engine_servers.PYTHONS[0])

    async def work(engine):
        before = await asyncio.gather(*map(engine.generate, REQUESTS))
        await engine.rest()
        after = await asyncio.gather(*map(engine.generate, REQUESTS))  # woken by who asks for samples
        await engine.rest()
        await engine.update_weights(tiny_models.llama(7).named_parameters(), 1)
        return before, after

    given = {"python": python, "num_servers": 2, "sleep": True, "server_args": ("--mem-fraction-static", "0.7")}
    before, after = sglang(work, addresses=(), **given)
    agree(before, own(model, *REQUESTS))
    agree(after, own(model, *REQUESTS))
    seen = engine_servers.seen()
    assert [(s["release_memory_occupation"], s["resume_memory_occupation"]) for s in seen] == [(2, 2)] * 2
    (started, *_) = [name for name in seen[0] if name.startswith("started")]
    assert "sglang.launch_server --model-path" in started
    for flag in ("deterministic-inference", "memory-saver", "weights-cpu-backup"):
        assert f"--enable-{flag}" in started
    assert started.endswith("--mem-fraction-static 0.7 --host 127.0.0.1 --port")


def test_without_an_environment_for_sglang_the_message_says_how_to_get_one(sglang):
    with pytest.raises(
        UserError, match=r"environment with SGLang, got '/nowhere/python': there is none\. python -m venv"
    ):
        sglang(all_of(REQUESTS), addresses=(), python="/nowhere/python")
