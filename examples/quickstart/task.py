"""The quickstart's task and starting model: reverse a short string of letters.

Writes a Llama-shaped model of 0.41 million parameters with random weights, a character tokenizer, demonstrations, and
prompts; the held-out ones occur in neither demonstrations nor training prompts. Half of the demonstrations have their
letters shuffled: what they teach is the right answer and a wrong habit beside it, so that there is something to select.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path

LETTERS = "abcdefgh"
NUM_HELD_OUT = 256
NUM_DEMONSTRATIONS = 8192


def write_task(folder: Path, seed: int) -> None:
    """Fill `folder` with start/ (the model), demonstrations.jsonl, train.jsonl and held_out.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    words = ["".join(letters) for n in (3, 4) for letters in itertools.product(LETTERS, repeat=n)]
    rng.shuffle(words)
    held_out, train = words[:NUM_HELD_OUT], words[NUM_HELD_OUT:]
    _write(folder / "held_out.jsonl", ({"prompt": f"{w}=", "label": w[::-1]} for w in held_out))
    _write(folder / "train.jsonl", ({"prompt": f"{w}=", "label": w[::-1]} for w in train))
    _write(folder / "demonstrations.jsonl", (_demonstration(rng, train) for _ in range(NUM_DEMONSTRATIONS)))
    _write_model(folder / "start", seed)


def _demonstration(rng: random.Random, words: list[str]) -> dict[str, str]:
    word = rng.choice(words)
    response = list(word[::-1])
    if rng.random() < 0.5:
        rng.shuffle(response)
    return {"prompt": f"{word}=", "response": "".join(response)}


def _write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_model(folder: Path, seed: int) -> None:
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()  # of one file
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "=", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
