"""The decoders of the engine `torch`: keys and values of a prompt in each of its samples' slots; once for all samples of the
group; and so, without the calls of the model's modules.

    .venv/bin/python benchmarks/decoders.py [--repeats 3] [--threads 1] [--cases NAME ...]

Models of random weights in the shape of the quickstart's and of SmolLM2-135M, all responses as long as the limit, 32 slots.
Figures are process CPU time of sampling, prompts included, medians of turns that all take one after the other, and how many
positions of keys and values a layer holds. Sampled log-probabilities agree, which is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

import torch
from contest import machine
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from strop.engines import TorchEngine
from strop.engines.decoders import SlotDecoder
from strop.engines.lean import lean_decoder
from strop.engines.shared_prompts import SharedPromptDecoder
from strop.types import Completion, GenerateRequest, Sampling

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 32,
}
SMOL = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
# name -> shape, prompts, samples of each, prompt tokens, response tokens
CASES: dict[str, tuple[dict[str, int], int, int, int, int]] = {
    "quickstart 4 x 8, 512 + 48": (SMALL, 4, 8, 512, 48),
    "quickstart 4 x 8, 16 + 96": (SMALL, 4, 8, 16, 96),
    "quickstart 32 x 1, 16 + 96": (SMALL, 32, 1, 16, 96),
    "quickstart 1 x 4, 16 + 96": (SMALL, 1, 4, 16, 96),
    "quickstart 32 x 1, 512 + 48": (SMALL, 32, 1, 512, 48),
    "SmolLM2 4 x 8, 512 + 8": (SMOL, 4, 8, 512, 8),
    "SmolLM2 32 x 1, 16 + 8": (SMOL, 32, 1, 16, 8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="turns of each (default 3)")
    parser.add_argument("--threads", type=int, default=1, help="default 1")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    table = Table("", "in each slot: CPU s", "shared", "without modules", "positions", "shared")
    for case in given.cases:
        table.add_row(case, *measure(*CASES[case], repeats=given.repeats))
    console = Console()
    console.print(table)
    console.print(f"{given.threads} threads; {machine('torch', 'transformers')}")


def measure(shape: dict[str, int], prompts: int, samples: int, length: int, limit: int, *, repeats: int) -> list[str]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=1024, tie_word_embeddings=True))
    ids = [tuple((7 * p + 3 * i) % 29 + 2 for i in range(length)) for p in range(prompts)]
    requests = [GenerateRequest(one, tuple(range(samples)), Sampling(max_response_tokens=limit)) for one in ids]
    engines = [engine_with(model, kind) for kind in (SlotDecoder, SharedPromptDecoder, lean_decoder)]
    first, *others = [sampled(engine, requests) for engine in engines]  # unmeasured
    assert all(gap(first, other) < 1e-4 for other in others)
    turns = [[cpu_seconds(engine, requests) for engine in engines] for _ in range(repeats)]
    slots, shared, lean = (statistics.median(measured) for measured in zip(*turns, strict=True))
    positions = [positions_of(engine) for engine in engines[:2]]
    return [f"{slots:.2f}", f"{shared / slots:.2f}", f"{lean / slots:.2f}", *map(str, positions)]


def gap(one: list[list[Completion]], other: list[list[Completion]]) -> float:
    """Of the first tokens, which are the same."""
    pairs = ((a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True))
    return max(abs(a.logprobs[0] - b.logprobs[0]) for a, b in pairs)


def cpu_seconds(engine: TorchEngine, requests: list[GenerateRequest]) -> float:
    start = time.process_time()
    sampled(engine, requests)
    return time.process_time() - start


def engine_with(model: Any, kind: Any) -> TorchEngine:
    engine = TorchEngine(model, stop_token_ids=[], max_sequences=32)
    engine._decoder_kind = kind
    return engine


def sampled(engine: TorchEngine, requests: list[GenerateRequest]) -> list[list[Completion]]:
    async def everything() -> list[list[Completion]]:
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    return asyncio.run(everything())


def positions_of(engine: TorchEngine) -> int:
    layer: Any = engine._decoder._cache.layers[0]  # type: ignore[union-attr]
    stores = [layer.keys, getattr(layer, "prompt_keys", None)]
    return sum(store.shape[0] * store.shape[2] for store in stores if store is not None)


if __name__ == "__main__":
    main()
