"""The engine `torch` against transformers' `generate`, and against vLLM in process where `make vllm-env` was made: same
prompts, same lengths, same model, and as many sequences at the same time.

    .venv/bin/python benchmarks/sampling.py [--model FOLDER] [--repeats 5] [--threads 2]

Lengths are ragged, their mean a third of the limit: each response ends where a list says, on all sides, so that the same
tokens are made. `generate` runs until the last row ends; strop and vLLM give the slot of a finished one to the next. strop and
vLLM give the log-probability of every token, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from contest import machine, report, run_in_turn
from grpo_step import quickstart_model
from rich.console import Console
from rich.table import Table

SLOTS = 64  # of the engine, as is the default
VLLM = ".venv-vllm/bin/python"
# name -> prompts, samples of each, prompt tokens, limit of response tokens
CASES = {
    "32 sequences": (32, 1, 16, 96),
    "64 sequences": (64, 1, 16, 96),
    "8 x 8, prompts of 512": (8, 8, 512, 48),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face folder; default: the quickstart's model with 1024 positions")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each (default 5)")
    parser.add_argument("--threads", type=int, default=2, help="of each process (default 2)")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument(
        "--vllm", default=VLLM, help=f"Python that has vLLM and strop, if there is one (default {VLLM})"
    )
    parser.add_argument("--contestant", choices=list(CONTESTANTS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contestant:
        CONTESTANTS[given.contestant](given.model, *CASES[given.cases[0]])
        return
    names = [name for name in CONTESTANTS if name != "vllm" or Path(given.vllm).exists()]
    table = Table("", "", "tokens/s", "speed", "peak MB", title="sampling, ragged lengths")
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or longer(quickstart_model(Path(folder)))
        for case in given.cases:
            words = [__file__, "--model", model, "--cases", case, "--contestant"]
            contestants, pythons = {n: [*words, n] for n in names}, {"vllm": given.vllm}
            found = run_in_turn(contestants, given.repeats, given.threads, pythons=pythons)
            for name, m in found.items():
                speed = found["generate"]["seconds"] / m["seconds"]
                table.add_row(case, name, f"{m['tokens'] / m['seconds']:.0f}", f"{speed:.2f}x", f"{m['peak_mb']:.0f}")
    console = Console()
    console.print(table)
    console.print(f"{given.threads} threads; {machine('torch', 'transformers')}")


def longer(model: str, positions: int = 1024) -> str:
    """The quickstart's model with more positions, which cost no weights."""
    config = Path(model) / "config.json"
    values = json.loads(config.read_text()) | {"max_position_embeddings": positions}
    config.write_text(json.dumps(values))
    return model


def work(prompts: int, samples: int, length: int, limit: int) -> tuple[list[list[int]], list[int], int]:
    """Prompts as ids, the length of the responses to each (a third of the limit on average, one as long as the limit), and
    the number of samples."""
    rng = random.Random(0)
    ids = [[rng.randrange(2, 9) for _ in range(length)] for _ in range(prompts)]
    lengths = [min(limit, 1 + int(rng.expovariate(3 / limit))) for _ in range(prompts)]
    return ids, [limit, *lengths[1:]], samples


def by_strop(model: str, *case: int) -> None:
    from strop.config.training import ModelOptions
    from strop.engines import TorchEngine
    from strop.runtime.models import load_model

    network = load_model(ModelOptions(path=model)).model
    by_engine(TorchEngine(network, stop_token_ids=[], max_sequences=SLOTS), list(network.named_parameters()), *case)


def by_vllm(model: str, *case: int) -> None:
    from strop.config import VLLMInProcessOptions
    from strop.config.training import ModelOptions
    from strop.engines.served.process import Served
    from strop.engines.vllm.in_process import VLLMInProcess
    from strop.runtime.models import load_model

    options = VLLMInProcessOptions(engine_args=("--max-num-seqs", str(SLOTS)))
    weights = list(load_model(ModelOptions(path=model)).model.named_parameters())
    by_engine(VLLMInProcess(options, Served(model, "float32", on_cpu=True), weights, stop_token_ids=[]), weights, *case)


def by_engine(engine: Any, weights: Any, *case: int) -> None:
    """Sample twice, with weights that come in between, as in training: nothing of prompts is remembered."""
    from strop.types import GenerateRequest, Sampling

    ids, lengths, samples = work(*case)
    requests = [
        GenerateRequest(tuple(prompt), tuple(range(samples)), Sampling(max_response_tokens=length))
        for prompt, length in zip(ids, lengths, strict=True)
    ]

    async def everything() -> int:
        groups = await asyncio.gather(*(engine.generate(request) for request in requests))
        return sum(len(completion.tokens) for group in groups for completion in group)

    asyncio.run(everything())
    asyncio.run(engine.update_weights(weights, 1))
    start = time.perf_counter()
    tokens = asyncio.run(everything())
    report(seconds=time.perf_counter() - start, tokens=tokens)


def by_generate(model: str, *case: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    ids, lengths, samples = work(*case)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    flat = torch.tensor(lengths).repeat_interleave(samples)
    rows = torch.tensor(ids).repeat_interleave(samples, dim=0)

    class Ends(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            return input_ids.shape[1] - rows.shape[1] >= flat

    settings = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": max(lengths)}
    ends = StoppingCriteriaList([Ends()])

    def everything() -> None:
        network.generate(rows, attention_mask=torch.ones_like(rows), stopping_criteria=ends, **settings)

    with torch.inference_mode():
        everything()
        start = time.perf_counter()
        everything()
    report(seconds=time.perf_counter() - start, tokens=int(flat.sum()))


CONTESTANTS = {"strop": by_strop, "generate": by_generate, "vllm": by_vllm}

if __name__ == "__main__":
    main()
