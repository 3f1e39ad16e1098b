"""The engine vllm, against a small server that holds to vLLM's protocol and samples by the numbers of the engine torch: what of
it is its own (test_engines_apart.py has the rest), new weights, and what becomes of servers that fail."""

import asyncio
import threading

import pytest
import tiny_models
import torch
from made_requests import request
from made_servers import REQUESTS, agree, all_of, changed, drop, on, own, refuse, runner, two_of

from strop.config import VLLMEngineOptions
from strop.engines.vllm.engine import VLLMEngine
from strop.runtime.audit.teacher_server import Refused, serving
from strop.runtime.audit.vllm_server import StandIn
from strop.types import EngineError, GuardError, ModelError, UserError, WaitError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "model"
    tiny_models.llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def servers(folder):
    yield from two_of(StandIn, folder)


@pytest.fixture
def vllm(server, servers, model):
    return runner(VLLMEngine, VLLMEngineOptions, servers, model)


# ---- samples ----------------------------------------------------------------------------------------------------------


def test_a_server_that_gives_logprobs_at_temperature_1_alone_is_refused(vllm, folder):
    with serving(StandIn(folder, at_temperature=False)) as address:
        with pytest.raises(UserError, match="--logprobs-mode processed_logprobs"):
            vllm(all_of([request([3], temperature=0.5)]), addresses=[address])
        vllm(all_of([request([3])]), addresses=[address])


# ---- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes_only", [False, True], ids=["whole", "changes only"])
def test_after_an_update_all_servers_sample_what_the_source_would(vllm, changes_only, tmp_path):
    source = tiny_models.llama(7)

    async def work(engine):
        await engine.generate(REQUESTS[0])
        first = await engine.update_weights(source.named_parameters(), 3)
        found = await asyncio.gather(*map(engine.generate, REQUESTS))
        with torch.no_grad():
            source.model.embed_tokens.weight[4, 2] += 0.5
            source.lm_head.weight[7] *= 1.5
        second = await engine.update_weights(source.named_parameters(), 4)
        return found, first, second, await asyncio.gather(*map(engine.generate, REQUESTS))

    kept = {name: p.detach().clone() for name, p in source.named_parameters()}
    found, first, second, then = vllm(
        work, num=2, transfer_changes_only=changes_only, transfer_folder=str(tmp_path / "weights")
    )
    agree(then, own(source, *REQUESTS, version=4))
    source.load_state_dict(kept)
    agree(found, own(source, *REQUESTS, version=3))
    num_bytes = sum(p.nbytes for p in source.parameters())
    assert first["weights_bytes"].value > 4 * num_bytes  # of the first sample and of the update, for two servers
    assert first["seconds/weights"].value > 0
    assert (second["weights_bytes"].value < num_bytes) is changes_only
    assert list((tmp_path / "weights").iterdir()) == []


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_every_token_in_flight_says_which_weights_sampled_it(vllm, server, mode):
    asked = request([3], seeds=(1,), length=60)
    server.begin(token_s=0.01)

    async def work(engine):
        await engine.generate(request([3], length=1))
        flying = asyncio.create_task(engine.generate(asked))
        while server.num_sampled < 20:
            await asyncio.sleep(0.001)
        await engine.update_weights(tiny_models.llama(7).named_parameters(), 1)
        return await flying

    completions = vllm(work, pause_mode=mode)
    assert {v for c in completions for v in c.policy_versions} == {"keep": {0, 1}, "wait": {0}, "abort": {0}}[mode]
    assert all(list(c.policy_versions) == sorted(c.policy_versions) for c in completions)
    assert {c.finish_reason for c in completions} == {"abort" if mode == "abort" else "length"}
    assert all(len(c.tokens) == 60 for c in completions) is (mode != "abort")


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"tie_word_embeddings": True}, "missing ['lm_head.weight']"),
        ({"intermediate_size": 20}, "mlp.up_proj.weight (20, 16)"),
    ],
    ids=["names", "shapes"],
)
def test_a_server_of_another_model_refuses_the_weights_and_says_why(vllm, changes, said):
    """Case 23, on the server's side, which holds an untied model."""
    with pytest.raises(ModelError, match="weights do not fit the model of vLLM server http://127") as refused:
        vllm(all_of(REQUESTS), of=tiny_models.llama(**changes))
    assert said in str(refused.value)


# ---- servers that fail ------------------------------------------------------------------------------------------------


def in_choice(change):
    return changed(lambda found: change(found["choices"][0]))


@pytest.mark.parametrize(
    "path", ["/generate", "/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"]
)
def test_a_connection_that_is_lost_costs_no_sample_and_is_told(vllm, server, model, path):
    told = []
    server.begin(on(path, drop, calls=(2,)))

    async def work(engine):
        await engine.generate(REQUESTS[0])
        metrics = await engine.update_weights(tiny_models.llama(7).named_parameters(), 1)
        return await asyncio.gather(*map(engine.generate, REQUESTS)), metrics

    found, metrics = vllm(work, tell=told.append)
    agree(found, own(tiny_models.llama(7), *REQUESTS, version=1))
    assert metrics["engine_restarts"].value == 1
    assert len(told) == 1
    assert "is lost" in told[0]


def test_a_server_that_was_started_again_behind_the_engines_back_is_found_out(vllm, server, servers):
    source = tiny_models.llama(7)

    async def work(engine):
        await engine.update_weights(source.named_parameters(), 1)
        server.begin()  # the weights of its folder, under no label of this run
        return await asyncio.gather(*map(engine.generate, REQUESTS))

    told = []
    agree(vllm(work, tell=told.append), own(source, *REQUESTS, version=1))
    assert ["weights that this run did not give it" in words for words in told] == [True]


def test_a_server_that_lacks_what_changes_apply_to_is_given_all_weights(vllm, server):
    source = tiny_models.llama(7)

    async def work(engine):
        await engine.generate(REQUESTS[0])
        server.begin()
        with torch.no_grad():
            source.lm_head.weight[7] *= 1.5
        await engine.update_weights(source.named_parameters(), 1)
        return await asyncio.gather(*map(engine.generate, REQUESTS))

    found = vllm(work, transfer_changes_only=True, of=tiny_models.llama(7))
    agree(found, own(source, *REQUESTS, version=1))


def test_a_server_that_is_lost_again_and_again_ends_the_run(vllm, server):
    server.begin(on("/generate", drop, calls=range(1, 100)))
    with pytest.raises(EngineError, match=r"was lost 3 times in a row \(engine\.max_restarts = 2\): /inference"):
        vllm(all_of([request([3])]), max_restarts=2)


def test_a_refusal_after_which_the_server_closes_the_connection_is_no_loss(vllm, server):
    health = on("/health", drop, calls=(2,))  # the first is that of its start

    def spoil(path, body, answer):
        if path.endswith("/generate"):
            raise Refused(500, "no such thing")
        return health(path, body, answer)

    server.begin(spoil)
    with pytest.raises(EngineError, match=r"refuses /inference/v1/generate \(500\): no such thing"):
        vllm(all_of([request([3])]), max_restarts=0)


def test_a_server_that_does_not_answer_is_named_when_its_time_is_over(vllm, server):
    over = threading.Event()
    server.begin(on("/generate", lambda answer: over.wait(100)))
    try:
        with pytest.raises(
            WaitError, match=r"engine\.request_timeout_s = 0\.2 s went by in which vLLM server http://127"
        ):
            vllm(all_of([request([3])]), request_timeout_s=0.2)
    finally:
        over.set()


def test_a_server_that_is_not_there_is_named_when_its_time_is_over(vllm):
    with pytest.raises(
        WaitError, match=r"engine\.start_timeout_s = 0\.3 s went by in which vLLM server http://127\.0\.0\.1:1 "
    ):
        vllm(all_of([request([3])]), addresses=["http://127.0.0.1:1"], start_timeout_s=0.3)


def test_a_server_that_says_other_weights_after_an_update_ends_the_run(vllm, server):
    server.begin(on("/weight_info", lambda answer: {"weight_version": "default"}, calls=(1, 2)))
    with pytest.raises(EngineError, match=r"must hold weights .*:0:0 after its update, and says default"):
        vllm(all_of([request([3])]))


def test_files_that_arrive_damaged_are_an_error(vllm, server, monkeypatch):
    def damage(answer):
        server._inbox.check = lambda parcel: None
        taken = server._inbox.take

        def take(parcel, *, keep):
            return taken(type(parcel)(**{**parcel.as_json(), "checksum": "0" * 64}), keep=keep)

        server._inbox.take = take
        return answer()

    server.begin(on("/update_weights", damage))
    with pytest.raises(ModelError, match=r"the checksum of what was read is [0-9a-f]{12}, not 000000000000"):
        vllm(all_of([request([3])]))


@pytest.mark.parametrize(
    "path, act, kind, said",
    [
        (
            "/generate",
            in_choice(lambda c: c.update(logprobs=None)),
            EngineError,
            "a log-probability and a version with every token",
        ),
        ("/generate", in_choice(lambda c: c.update(weight_versions=None)), EngineError, "a version with every token"),
        ("/generate", in_choice(lambda c: c["token_ids"].append(3)), EngineError, "a log-probability and a version"),
        (
            "/generate",
            in_choice(lambda c: c["logprobs"]["content"][2].update(logprob=-9999.0)),
            GuardError,
            "not finite",
        ),
        ("/generate", in_choice(lambda c: c.pop("finish_reason")), EngineError, "not in its protocol"),
        ("/generate", refuse, UserError, "does not offer /inference/v1/generate, which strop needs"),
        ("/weight_info", refuse, UserError, "does not offer /weight_info"),
        ("/init_weight_transfer_engine", refuse, UserError, "does not offer /init_weight_transfer_engine"),
    ],
    ids=[
        "no logprobs",
        "no versions",
        "a token too many",
        "not finite",
        "no reason",
        "no path",
        "no labels",
        "no transfer",
    ],
)
def test_an_answer_that_lacks_something_ends_the_run_and_says_what(vllm, server, path, act, kind, said):
    server.begin(on(path, act))
    with pytest.raises(kind) as ended:
        vllm(all_of([request([3])]))
    assert said in str(ended.value)
