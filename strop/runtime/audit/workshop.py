"""What an audit trains on: a model of a few thousand weights, a tokenizer of characters, prompts, and a scorer.

Everything that an option may look at is there to be seen: columns under the names that the config gives them, a chat
template, code of the model's own in its folder, texts with white space and numbers, and a prompt that is cut short. What
an option names (a model, a file, a column, a function) is there twice, with different contents: `supplied` says which.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from strop.observe.rollout_file import write_rollouts
from strop.runtime.audit.engine_servers import PYTHONS, addresses, routers
from strop.types import Prompt, Rollout

COLUMNS = ("prompt_key", "label_key", "metadata_key", "source_key")
DEMONSTRATION_COLUMNS = ("prompt_key", "response_key", "messages_key")
SOURCES = ("even", "odd")  # of prompts
TEACHERS = ("teacher", "other_teacher")
CHARACTERS = "0123456789 .-+="
_END = "{% if m['role'] == 'assistant' %}<eos>{% endif %}"
_TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}" + _END + "{% endfor %}"
_OWN_CODE = """
from transformers import LlamaForCausalLM

class OwnLlama(LlamaForCausalLM):
    pass
"""
# score, named, score_token, named_token, score_turn, named_turn, the same with slime_ before them or _other behind, and two
# that fail. All are async, and of those that score one rollout a call the score tells whether others run at the same time.
_SCORER = """
import asyncio
import sys
import zlib

running = 0

async def _num_at_once():
    global running
    running += 1
    await asyncio.sleep(0)
    found = min(running, 2)  # how many more depends on how soon others come
    await asyncio.sleep(0)
    running -= 1
    return found

async def _score(given, named, per, salt=0):
    more = await _num_at_once() / 1024
    if isinstance(given, list):
        return [_shaped(r, _of_rollout(r, salt) / 2, named, per) for r in given]
    return _shaped(given, _of_rollout(given, salt) + more * (given.prompt.row % 4 > 0), named, per)

def _of_rollout(r, salt):
    if r.prompt.row % 4 == 0:
        return 1.0 + salt  # all samples of a group alike
    return _number(r.tokens, r.sample, salt, r.prompt.metadata.get("a"))

async def _slime_score(args, given, named, per, salt=0):
    more = getattr(args, "audit", 0) + await _num_at_once() / 1024
    if isinstance(given, list):
        return [_shaped(s, _number(s.tokens, s.index, salt) / 2 + more, named, per) for s in given]
    score = _number(given.tokens, given.index, salt) + more
    if args.reward_key is None:
        return _shaped(given, score, named, per)
    return {"one": _shaped(given, score / 2, named, per), "two": _shaped(given, score / 2 + given.index % 3, named, per)}

def _shaped(rollout, score, named, per):
    num_tokens = sum(rollout.response_mask if hasattr(rollout, "response_mask") else rollout.loss_mask)
    values = {"": score, "_turn": [score], "_token": [score] * num_tokens}[per]
    return {"one": values, "two": score % 1.0 + len(rollout.tokens)} if named else values

def _number(*seen):
    return zlib.crc32(repr(seen).encode()) % 5 / 2

def _function(named, per, other):
    async def score(given):
        return await _score(given, named, per, len(other) / 8)

    async def slime_score(args, given):
        return await _slime_score(args, given, named, per, len(other) / 8)

    name = f"{named or 'score'}{per}{other}"
    return {name: score, f"slime_{name}": slime_score}

for _named in ("", "named"):
    for _per in ("", "_turn", "_token"):
        for _other in ("", "_other"):
            globals().update(_function(_named, _per, _other))

async def failing(given):
    for rollout in given if isinstance(given, list) else [given]:
        if rollout.sample == 0:
            raise ValueError("a scorer that fails")
    return await _score(given, "", "")

async def slime_failing(args, given):
    raise ValueError("a scorer that fails")

async def demanding(given):
    bytearray(128 << 20)
    is_of_run = "torch" in sys.modules  # not in a worker of its own
    return [is_of_run] * len(given) if isinstance(given, list) else is_of_run

async def slime_demanding(args, given):
    found = await demanding(given)
    return found if args.reward_key is None or isinstance(given, list) else {args.reward_key: found}

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


def write_workshop(folder: Path, *, num_layers: int = 1) -> None:
    """Fill a folder with model/, other/, plain/ (without a chat template), two teachers, scorer.py, and files of prompts and of
    demonstrations, two of each. `num_layers`: of the models."""
    logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    for place, name in enumerate(("model", "other", *TEACHERS)):
        _write_model(folder / name, place, num_layers)
    shutil.copytree(folder / "model", folder / "plain")
    for path in (folder / "plain").glob("chat_template*"):
        path.unlink()
    (folder / "scorer.py").write_text(_SCORER)
    columns = {name: name.removesuffix("_key") for name in COLUMNS}
    for table, kind, other in product(("data", "eval.data"), ("jsonl", "parquet"), ("", "-other")):
        write_prompts(folder / f"{table}{other}.{kind}", columns, num_rows=6)


def sources_of(now: dict[str, Any]) -> tuple[str, ...]:
    """Where the prompts of the audit's runs come from: generated tasks have the dataset's name."""
    return ("chain_sum",) if now.get("data.kind") == "reasoning_gym" else SOURCES


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
        return function_of(now, table, folder, is_named=False)
    if name in ("teacher", "teachers"):
        one, other = (str(folder / place) for place in TEACHERS)
        sources = sources_of(now)
        return (one, other) if name == "teacher" else ({}, {sources[0]: other}, dict.fromkeys(sources, other))
    if path in ("filter.group", "filter.rollout"):
        return (f"{folder}/scorer.py:keeps_{name}",)
    if path == "rollout.from_folder":
        return (_write_recorded(now, folder / "recorded"),)
    if path == "engine.python":
        return tuple(str(folder / name) for name in PYTHONS)
    if path == "engine.addresses":
        return addresses()[:1], addresses()
    if path == "engine.router":
        return routers()
    of_name = {
        "path": (str(folder / "model"), str(folder / "other")),
        "transfer_folder": (str(folder / "weights"), str(folder / "weights-other")),
        "folder": (str(folder / "run"), str(folder / "run-other")),
        "reward_key": ("one", "two"),
        "max_length_tokens": (7, 9),
        "max_tokens_in_flight": (60, 100, 700, 100_000),
        "max_cache_tokens": (100, 700, 100_000),
        "weights": ({}, {"one": 1.0, "two": 0.5}),
        "source_weights": ({}, dict(zip(SOURCES, (1.0, 4.0), strict=True))),
        "name": ("chain_sum", "basic_arithmetic"),
        "options": ({}, {"max_terms": 2}),
        "stop_token_ids": ((), (3,), tuple(range(2, 2 + len(CHARACTERS)))),
    }
    return of_name.get(name, ())


def _write_recorded(now: dict[str, Any], folder: Path) -> str:
    """Rollouts that nobody sampled, as a run of these values would have recorded them."""
    names = ("temperature", "prompts_per_step", "group_size")
    about = {name: now[f"rollout.{name}"] for name in names} | {"model": now["model.path"]}
    folder.mkdir(exist_ok=True)
    (folder / "about.json").write_text(json.dumps(about))
    for step in range(1, now["run.num_steps"] + 1):
        rows = [
            _recorded(step, group, sample)
            for group in range(now["rollout.prompts_per_step"])
            for sample in range(now["rollout.group_size"])
        ]
        write_rollouts(folder / f"step_{step:06d}.jsonl", rows)
    return str(folder)


def _recorded(step: int, group: int, sample: int) -> Rollout:
    draw = random.Random(f"{step} {group} {sample}")
    tokens = (2, *(draw.randrange(2, 2 + len(CHARACTERS)) for _ in range(3)))
    logprobs = (0.0, *(-draw.random() - 1.0 for _ in range(3)))
    prompt = Prompt(row=group, tokens=tokens[:1], text="0", label="7", source=SOURCES[group % 2])
    whole = Rollout(prompt, group, sample, tokens, (False, True, True, True), logprobs, (-1, 0, 0, 0), "stop", text="1")
    number = draw.random()
    return replace(whole, reward=number, reward_parts={"one": number / 2, "two": number / 2})


def function_of(now: dict[str, Any], table: str, folder: Path, *, is_named: bool) -> tuple[str, str]:
    """Two functions that return what the options of a table take: named rewards, numbers per token or turn."""
    kind, per = now.get(f"{table}.kind"), now.get(f"{table}.per", "response")
    is_gdpo = now.get("algorithm.advantage.kind") == "gdpo" and table == "reward" and kind == "function"
    name = "named" if is_named or is_gdpo or now.get(f"{table}.weights") else "score"
    before, after = "slime_" if kind == "slime" else "", "" if per == "response" else f"_{per}"
    first = f"{folder}/scorer.py:{before}{name}{after}"
    return first, f"{first}_other"


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
        "source_key": other + SOURCES[a % 2],
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


def _write_model(folder: Path, seed: int, num_layers: int) -> None:
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
        num_hidden_layers=num_layers,
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
