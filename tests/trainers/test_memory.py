"""Too little memory is one sentence that names the option to lower. In a process of its own, whose memory is limited."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

SCRIPT = """
import resource
import torch
import tiny_models
from made_batches import make_batch, make_objective, make_trainer
from made_requests import engine_of, request, run
from strop.types import ModelError

torch.set_num_threads(1)
model = tiny_models.llama(max_position_embeddings=10**6)
trainer = make_trainer(model, max_tokens_per_micro_batch=10**9, layout="padded")
engine = engine_of(model)
trainer.step(make_batch(([1], [2])), make_objective())
run(engine, request([1], length=2))
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 32 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
many, one = make_batch(*[([1], [2] * 5000)] * 20), make_batch(([1], [2] * 200000))
for attempt in (
    lambda: trainer.step(many, make_objective()),
    lambda: trainer.logprobs(many),
    lambda: trainer.logprobs(one),
    lambda: run(engine, request([1] * 30000, length=60000)),
):
    try:
        attempt()
    except ModelError as error:
        print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_a_batch_or_request_too_large_for_memory_is_one_sentence_that_says_what_to_lower():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={"PYTHONPATH": ":".join(map(str, (TESTS.parent, TESTS, TESTS / "trainers", TESTS / "engines")))},
    )
    assert done.returncode == 0, done.stderr
    step, logprobs, alone, engine = done.stdout.splitlines()
    many = "20 padded sequences of up to 5001 tokens (100020 together) would not fit memory: lower trainer.max_tokens_per_mi"
    assert step.startswith(many)
    assert logprobs.startswith(many)
    assert alone.startswith(
        "a sequence of 200001 tokens (alone in its micro-batch) would not fit memory: lower the length of"
    )
    assert engine.startswith(
        "1 slots of up to 90000 tokens would not fit memory: lower engine.max_sequences or the response"
    )
