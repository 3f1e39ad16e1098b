"""What an audit trains on: a model of a few thousand weights, a tokenizer of characters, prompts, and a scorer.

Everything that an option may look at is there to be seen: columns under the names that the config gives them, a chat
template, code of the model's own in its folder, texts with white space and numbers, and a prompt that is cut short. What
an option names (a model, a file, a column, a function) is there twice, with different contents: `supplied` says which.
"""

from __future__ import annotations

import json
import random
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

COLUMNS = ("prompt_key", "label_key", "metadata_key", "source_key")
DEMONSTRATION_COLUMNS = ("prompt_key", "response_key", "messages_key")
CHARACTERS = "0123456789 .-+="
_END = "{% if m['role'] == 'assistant' %}<eos>{% endif %}"
_TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}" + _END + "{% endfor %}"
_OWN_CODE = """
from transformers import LlamaForCausalLM

class OwnLlama(LlamaForCausalLM):
    pass
"""
_SCORER = """
import zlib

def score(given):
    return _each(given, _score)

def score_other(given):
    return _each(given, lambda rollout: _score(rollout, 1))

def named(given):
    return _each(given, _named)

def named_other(given):
    return _each(given, lambda rollout: _named(rollout, 1))

def failing(given):
    for rollout in given if isinstance(given, list) else [given]:
        if rollout.sample == 0:
            raise ValueError("a scorer that fails")
    return score(given)

async def slime(args, given):
    return _each(given, lambda sample: _of_slime(args, sample))

async def slime_other(args, given):
    return _each(given, lambda sample: _of_slime(args, sample, 1))

async def slime_failing(args, given):
    raise ValueError("a scorer that fails")

def _each(given, score):
    # Of a list, half of it: whether a function was handed a list can be seen.
    if not isinstance(given, list):
        return score(given)
    return [{k: v / 2 for k, v in s.items()} if isinstance(s, dict) else s / 2 for s in map(score, given)]

def _named(rollout, salt=0):
    return {"one": _score(rollout, salt), "two": _score(rollout, salt) % 1.0 + rollout.sample}

def _of_slime(args, sample, salt=0):
    found = _hash(salt, sample.tokens, sample.index) + getattr(args, "audit", 0)
    return {"one": found / 2, "two": found / 2 + sample.index % 3}

def _score(rollout, salt=0):
    return _hash(salt, rollout.tokens, rollout.sample, rollout.prompt.metadata.get("a"))

def _hash(*seen):
    return zlib.crc32(repr(seen).encode()) % 5 / 2
"""


def write_workshop(folder: Path) -> None:
    """Fill a folder with model/, other/ and plain/ (without a chat template), scorer.py, and files of prompts and of
    demonstrations, two of each."""
    logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    for place, name in enumerate(("model", "other")):
        _write_model(folder / name, seed=place)
    shutil.copytree(folder / "model", folder / "plain")
    for path in (folder / "plain").glob("chat_template*"):
        path.unlink()
    (folder / "scorer.py").write_text(_SCORER)
    columns = {name: name.removesuffix("_key") for name in COLUMNS}
    for table, kind, other in product(("data", "eval.data"), ("jsonl", "parquet"), ("", "-other")):
        write_prompts(folder / f"{table}{other}.{kind}", columns, num_rows=6)


def supplied(path: str, now: dict[str, Any], folder: Path) -> tuple[Any, ...]:
    """Two values of an option that the workshop has, the first being what the audit's runs begin with; none where the
    option's type tells all."""
    table, _, name = path.rpartition(".")
    kind = now.get(f"{table}.kind")
    if name.endswith("_key") and name in COLUMNS + DEMONSTRATION_COLUMNS:
        column = now.get(path, name.removesuffix("_key"))
        return column, f"other_{column}"
    if name == "path" and kind in ("jsonl", "parquet"):
        file = table if (folder / f"{table}.{kind}").exists() else "eval.data" if table.startswith("eval.") else "data"
        return str(folder / f"{file}.{kind}"), str(folder / f"{file}-other.{kind}")
    if name == "function":
        first = "slime" if kind == "slime" else "named" if now.get("algorithm.advantage.kind") == "gdpo" else "score"
        return f"{folder}/scorer.py:{first}", f"{folder}/scorer.py:{first}_other"
    of_name = {
        "path": (str(folder / "model"), str(folder / "other")),
        "folder": (str(folder / "run"), str(folder / "run-other")),
        "reward_key": ("one", "two"),
        "max_length_tokens": (7, 9),
        "name": ("chain_sum", "basic_arithmetic"),
        "options": ({}, {"max_terms": 2}),
        "stop_token_ids": ((), (3,), tuple(range(2, 2 + len(CHARACTERS)))),
    }
    return of_name.get(name, ())


def write_prompts(path: Path, columns: dict[str, str], *, num_rows: int, broken: bool = False) -> None:
    """Sums of two digits under the wanted column names, and others under other_ names, as JSONL or Parquet by the path's
    ending. Files of different names hold different sums."""
    rng = random.Random(path.stem.removesuffix("-broken") + path.suffix)
    rows = [_row(rng, columns, "") | _row(rng, columns, "other_") for _ in range(num_rows)]
    _write_rows(path, rows, broken)


def _row(rng: random.Random, columns: dict[str, str], other: str) -> dict[str, Any]:
    a, b = rng.randrange(10), rng.randrange(10)
    found = {
        "prompt_key": f"{a}+{b}=",
        "label_key": rng.choice([str(a + b), f" {a}", str(b)]),
        "metadata_key": {"a": a},
        "source_key": other + ("even" if a % 2 == 0 else "odd"),
    }
    return {other + columns[name]: value for name, value in found.items()}


def write_demonstrations(
    path: Path, columns: dict[str, str], *, broken: bool = False, as_messages: bool = False
) -> None:
    """The same sums with their answers, as prompt and response or as conversations of two turns."""
    rng = random.Random(path.stem.removesuffix("-broken") + path.suffix)
    rows = []
    for _ in range(12):
        row = {}
        for other in ("", "other_"):
            a, b = rng.randrange(10), rng.randrange(10)
            found: dict[str, Any] = {"prompt_key": f"{a}+{b}=", "response_key": f"{a + b}" + "." * rng.randrange(3)}
            if as_messages:
                turns = [
                    ("user", f"{a}+{b}="),
                    ("assistant", str(a + b)),
                    ("user", f"{b}-{a}="),
                    ("assistant", str(b - a)),
                ]
                found = {"messages_key": [{"role": role, "content": text} for role, text in turns]}
            row |= {other + columns[name]: value for name, value in found.items()}
        rows.append(row)
    _write_rows(path, rows, broken)


def _write_rows(path: Path, rows: list[dict[str, Any]], broken: bool) -> None:
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join([*lines[:3], "{", *lines[3:]] if broken else lines) + "\n", encoding="utf-8")


def _write_model(folder: Path, seed: int) -> None:
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
