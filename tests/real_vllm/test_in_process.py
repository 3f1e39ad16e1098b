"""vLLM in strop's own process: whole runs, and what it leaves of the process that it runs in. (test_engine.py has the rest.)"""

import asyncio
import random
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from commands.small_runs import read_lines, strop
from real_model import AGREES, requests, scored

from strop.config import VLLMInProcessOptions
from strop.engines.served.process import Served
from strop.engines.vllm.in_process import VLLMInProcess
from strop.types import GenerateRequest, Sampling, UserError

if find_spec("vllm") is None:
    pytest.skip(
        "vLLM is not in this environment: make test-vllm runs it in the other one, too", allow_module_level=True
    )
pytestmark = pytest.mark.filterwarnings("default")  # those of vLLM are its own

IN_PROCESS = ("--engine.kind", "vllm_in_process", "--engine-args", '["--max-model-len", "512"]')


def engine_of(folder, model, **options):
    served = Served(str(folder), "float32", True)
    return VLLMInProcess(VLLMInProcessOptions(**options), served, list(model.named_parameters()), stop_token_ids=())


def test_samples_in_flight_go_on_with_new_weights_and_the_process_is_as_it_was(model, folder):
    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    async def work():
        engine = engine_of(folder, model)
        try:
            flying = asyncio.create_task(
                engine.generate(GenerateRequest((5, 6), (1, 2), Sampling(max_response_tokens=60)))
            )
            for _ in range(30):
                await asyncio.sleep(0)
            await engine.update_weights(model.named_parameters(), 7)
            return await flying
        finally:
            await engine.close()

    before, set_num_threads = states(), torch.set_num_threads
    completions = asyncio.run(work())
    print([(c.policy_versions.count(0), c.policy_versions.count(7)) for c in completions])
    assert all(set(c.policy_versions) == {0, 7} and len(c.tokens) == 60 for c in completions)
    assert all(list(c.policy_versions) == sorted(c.policy_versions) for c in completions)
    assert states() == before
    assert torch.set_num_threads is set_num_threads


@pytest.mark.parametrize(
    "options, said",
    [
        (
            {"engine_args": ("--no-such-flag",)},
            "engine.engine_args must be what vllm serve takes: unrecognized arguments",
        ),
        ({"engine_args": ("-tp", "2")}, "engine.engine_args must leave vLLM in this process, with one device"),
        ({"engine_args": ("--logprobs-mode", "raw_logprobs")}, "must leave vLLM --logprobs-mode processed_logprobs"),
        ({"engine_args": ("--max-model-len", "1000000")}, "1000000"),
        ({"sleep": True}, "ValidationError: Value error, Sleep mode is not supported on current platform."),
    ],
    ids=["flag", "devices", "logprobs", "positions", "sleep"],
)
def test_what_vllm_cannot_be_started_with_is_an_error_that_says_why(model, folder, options, said):
    """That of sleep is one of CPUs."""
    with pytest.raises(UserError) as refused:
        asyncio.run(engine_of(folder, model, **options).generate(requests(model)[0]))
    assert said in str(refused.value)


def test_a_run_of_five_steps_agrees_at_every_step_and_one_that_is_resumed_is_the_same(config, tmp_path):
    held_out = (
        "--eval.data.kind",
        "jsonl",
        "--eval.data.path",
        config.parent / "train.jsonl",
        "--eval.data.max_prompts",
        "4",
    )
    flags = (*scored(config), *IN_PROCESS, *held_out, "--eval.at_start", "false", "--checkpoint-every-steps", "3")
    for folder, more in (("whole", ()), ("parts", ("--num-steps", "3")), ("parts", ("--resume",))):
        done = strop("train", config, *flags, "--run.folder", tmp_path / folder, *more)
        assert done.code == 0, done.err
    whole, parts = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    print([{name: row[name] for name in ("logprob_gap_max", "weights_bytes", "seconds/weights")} for row in whole])
    assert [row["step"] for row in whole] == [1, 2, 3, 4, 5]
    assert max(row["logprob_gap_max"] for row in whole) < AGREES
    assert len({row["loss"] for row in whole}) > 1
    weights = [(tmp_path / name / "model/model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]
    assert [row["loss"] for row in parts] == [row["loss"] for row in whole]
    done = strop("eval", tmp_path / "whole", *IN_PROCESS, *held_out)
    assert done.code == 0, done.err
    assert f"{whole[-1]['eval/greedy_reward']:.3f}" in done.out
