"""What the engines with weights of their own do alike, each against what stands for its servers, or for vLLM in this process,
and samples by the numbers of the engine torch."""

import asyncio

import pytest
import tiny_models
from made_requests import engine_of, request
from made_servers import REQUESTS, agree, all_of, own, run_closed, runner, two_of

from strop.config import SGLangEngineOptions, VLLMEngineOptions, VLLMInProcessOptions
from strop.engines.served.process import Served
from strop.engines.sglang.engine import SGLangEngine
from strop.engines.vllm.engine import VLLMEngine
from strop.engines.vllm.in_process import VLLMInProcess
from strop.runtime.audit import sglang_server, vllm_server
from strop.runtime.audit.vllm_core import in_place_of_vllm
from strop.types import ModelError, UserError

SERVED = {
    "vllm": (VLLMEngine, VLLMEngineOptions, vllm_server.StandIn),
    "sglang": (SGLangEngine, SGLangEngineOptions, sglang_server.StandIn),
}


@pytest.fixture(scope="module", params=[*SERVED, "vllm_in_process"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("apart") / "model"
    tiny_models.llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def servers(kind, folder):
    """Two stand-ins and their addresses; none for vLLM in this process."""
    yield from two_of(SERVED[kind][2], folder) if kind in SERVED else [[]]


@pytest.fixture
def engine(kind, folder, servers, model):
    """Runs work with an engine, which is closed then; options as they are given."""
    for stand_in, _ in servers:
        stand_in.begin()
    if kind in SERVED:
        yield runner(*SERVED[kind][:2], servers, model)
        return

    def run_with(work, *, stop=(), of=None):
        served, weights = Served(str(folder), "float32", True), list((of or model).named_parameters())
        return run_closed(VLLMInProcess(VLLMInProcessOptions(), served, weights, stop_token_ids=stop), work)

    with in_place_of_vllm():
        yield run_with


def test_samples_are_those_of_the_engine_torch(engine, model):
    agree(engine(all_of(REQUESTS)), own(model, *REQUESTS))


def test_prompts_are_spread_over_servers(engine, servers, model):
    if not servers:
        pytest.skip("it has none")
    agree(engine(all_of(REQUESTS), num=2), own(model, *REQUESTS))
    assert all(stand_in.num_sampled > 0 for stand_in, _ in servers)


def test_end_tokens_of_the_engine_and_of_the_request_end_a_sample(engine, model):
    asked = request([3, 4], seeds=range(1, 9), length=30, stop_token_ids=(5, 6))
    found = engine(all_of([asked]), stop=(7, 8, 9))
    agree(found, own(model, asked, stop=(7, 8, 9)))
    assert {c.finish_reason for c in found[0]} == {"stop"}


@pytest.mark.parametrize("sampling", [{"temperature": 0.5}, {"temperature": 0.0}], ids=["0.5", "greedy"])
def test_logprobs_are_those_at_the_sampling_temperature(engine, model, sampling):
    asked = request([3, 4], seeds=(1, 2), **sampling)
    agree(engine(all_of([asked])), own(model, asked))


def test_given_tokens_are_scored_as_the_engine_torch_scores_them(engine, model):
    tokens = [3, 4, 9, 11, 2]
    wanted = asyncio.run(engine_of(model).logprobs(tokens))
    assert engine(lambda engine: engine.logprobs(tokens)) == pytest.approx(wanted, abs=1e-5)


def test_a_prompt_that_is_too_long_is_refused(engine, kind):
    whose, length, larger = {
        "vllm": ("the vLLM server's", 8192, "--max-model-len"),
        "sglang": ("the SGLang server's", 8186, "--context-length"),
        "vllm_in_process": ("vLLM's", 8192, "--max-model-len"),
    }[kind]
    with pytest.raises(UserError, match=f"fit {whose} {length} positions, got 2 prompt tokens .* a larger {larger}"):
        engine(all_of([request([3, 4], length=length - 1)]))


def test_the_first_sample_is_of_the_trainers_weights_whatever_it_began_with(engine):
    trained = tiny_models.llama(7)
    agree(engine(all_of(REQUESTS), of=trained), own(trained, *REQUESTS))


def test_a_run_that_is_resumed_counts_versions_on_from_where_it_was(engine):
    async def work(engine):
        engine.policy_version = 5
        return await engine.generate(REQUESTS[0])

    assert {v for c in engine(work) for v in c.policy_versions} == {5}


def test_after_an_update_samples_are_those_of_the_source(engine, kind):
    source = tiny_models.llama(7)

    async def work(engine):
        await engine.generate(REQUESTS[0])
        metrics = await engine.update_weights(source.named_parameters(), 3)
        return await asyncio.gather(*map(engine.generate, REQUESTS)), metrics

    found, metrics = engine(work)
    agree(found, own(source, *REQUESTS, version=3))
    num_bytes = sum(p.nbytes for p in source.parameters())
    assert metrics["weights_bytes"].value >= 2 * num_bytes  # of the first sample, too
    assert metrics["seconds/weights"].value > 0


def test_a_renamed_tensor_is_an_error_that_lists_missing_and_unexpected_names(engine, model):
    """Case 23, on the trainer's side: what samples is not even paused."""
    weights = dict(model.named_parameters())
    weights["model.norm.scale"] = weights.pop("model.norm.weight")
    with pytest.raises(ModelError) as refused:
        engine(lambda engine: engine.update_weights(weights.items(), 1))
    assert "missing ['model.norm.weight'], unexpected ['model.norm.scale']" in str(refused.value)
