"""What an audit trains on: a model of a few thousand weights, a tokenizer of characters, prompts, and a scorer.

Everything that an option may look at is there to be seen: columns under the names that the config gives them, a chat
template, code of the model's own in its folder, texts with white space and numbers, and a prompt that is cut short.
"""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

COLUMNS = ("prompt_key", "label_key", "metadata_key", "source_key")
SOURCES = ("even", "odd")  # of prompts
TEACHERS = ("teacher", "other_teacher")
CHARACTERS = "0123456789 .-+="
_TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{% endfor %}"
_OWN_CODE = """
from transformers import LlamaForCausalLM

class OwnLlama(LlamaForCausalLM):
    pass
"""
# score, named, score_token, named_token, score_turn, named_turn, the same with slime_ before them, and two that fail. All are
# async, and of those that score one rollout a call the score tells how many others run at the same time.
_SCORER = """
import asyncio
import zlib

running = 0

async def _num_at_once():
    global running
    running += 1
    await asyncio.sleep(0)
    found = running
    await asyncio.sleep(0)
    running -= 1
    return found

async def _score(given, named, per):
    more = await _num_at_once() / 1024
    if isinstance(given, list):
        return [_shaped(rollout, _number(rollout.tokens, rollout.sample) / 2, named, per) for rollout in given]
    return _shaped(given, _number(given.tokens, given.sample) + more, named, per)

async def _slime_score(args, given, named, per):
    more = getattr(args, "audit", 0) + await _num_at_once() / 1024
    if isinstance(given, list):
        return [_shaped(s, _number(s.tokens, s.index) / 2 + more, named, per) for s in given]
    score = _number(given.tokens, given.index) + more
    if args.reward_key is None:
        return _shaped(given, score, named, per)
    return {args.reward_key: _shaped(given, score / 2, named, per)}

def _shaped(rollout, score, named, per):
    num_tokens = sum(rollout.response_mask if hasattr(rollout, "response_mask") else rollout.loss_mask)
    values = {"": score, "_turn": [score], "_token": [score] * num_tokens}[per]
    return {"one": values, "two": score % 1.0 + len(rollout.tokens)} if named else values

def _number(tokens, which):
    return zlib.crc32(repr((tokens, which)).encode()) % 5 / 2

def _function(named, per):
    async def score(given):
        return await _score(given, named, per)

    async def slime_score(args, given):
        return await _slime_score(args, given, named, per)

    return {f"{named or 'score'}{per}": score, f"slime_{named or 'score'}{per}": slime_score}

for _named in ("", "named"):
    for _per in ("", "_turn", "_token"):
        globals().update(_function(_named, _per))

async def failing(given):
    for rollout in given if isinstance(given, list) else [given]:
        if rollout.sample == 0:
            raise ValueError("a scorer that fails")
    return await _score(given, "", "")

async def slime_failing(args, given):
    raise ValueError("a scorer that fails")

def keeps_group(*given):
    if len(given) == 1:
        return given[0].prompt.row % 3 > 0
    args, samples = given
    return zlib.crc32(repr(samples[0].tokens).encode()) % 3 > getattr(args, "audit", 0)

def keeps_rollout(rollout):
    return rollout.sample > 0

def keeps_nothing(rollout):
    return False
"""


def write_workshop(folder: Path) -> None:
    """Fill a folder with model/, two teachers, scorer.py, and a file of prompts for each table and kind of data file."""
    logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(("model", *TEACHERS)):
        _write_model(folder / name, seed=seed)
    (folder / "scorer.py").write_text(_SCORER)
    columns = {name: name.removesuffix("_key") for name in COLUMNS}
    for table, kind in product(("data", "eval.data"), ("jsonl", "parquet")):
        write_prompts(folder / f"{table}.{kind}", columns, num_rows=6)


def write_prompts(path: Path, columns: dict[str, str], *, num_rows: int, broken: bool = False) -> None:
    """Sums of two digits under the wanted column names, as JSONL or Parquet by the path's ending."""
    rng = random.Random(num_rows)
    rows = []
    for _ in range(num_rows):
        a, b = rng.randrange(10), rng.randrange(10)
        label = rng.choice([str(a + b), f" {a}", str(b)])
        rows.append(
            {
                columns["prompt_key"]: f"{a}+{b}=",
                columns["label_key"]: label,
                columns["metadata_key"]: {"a": a},
                columns["source_key"]: SOURCES[a % 2],
            }
        )
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join([*lines[:3], "{", *lines[3:]] if broken else lines) + "\n", encoding="utf-8")


def _write_model(folder: Path, *, seed: int) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(["<unk>", "<eos>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.3,
        max_position_embeddings=8192,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "own_code.py").write_text(_OWN_CODE)
    settings = json.loads((folder / "config.json").read_text())
    settings["auto_map"] = {"AutoModelForCausalLM": "own_code.OwnLlama"}
    (folder / "config.json").write_text(json.dumps(settings))
