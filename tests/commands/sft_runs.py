"""Runs of strop sft small enough for tests: conversations over a ChatML-like template, and a model that reads them."""

import json
from functools import cache

from commands.small_runs import strop, write_model
from data.chat_templates import CHATML, chat_tokenizer

CONFIG = """
[model]
path = "{folder}/start"
[data]
path = "{folder}/train.jsonl"
batch_size = 4
[trainer]
lr = 0.02
num_threads = 1
[run]
num_steps = 6
"""


def write_sft_small(folder):
    """Fill a folder with start/ (the model), train.jsonl (18 conversations), held_out.jsonl (7) and sft.toml."""
    tokenizer = chat_tokenizer(CHATML)
    write_model(folder / "start", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder / "start")
    config = json.loads((folder / "start/generation_config.json").read_text())
    config["eos_token_id"] = [2, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    (folder / "start/generation_config.json").write_text(json.dumps(config))
    for name, count, start in (("train", 18, 0), ("held_out", 7, 18)):
        rows = [json.dumps({"messages": conversation(n)}) + "\n" for n in range(start, start + count)]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    (folder / "sft.toml").write_text(CONFIG.format(folder=folder))
    return folder


def conversation(number):
    """Two turns of uneven length: the letters after the one that is asked for."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    turns = []
    for turn in range(1 + number % 2):
        start = (3 * number + turn) % 20
        answer = letters[start + 1 : start + 2 + number % 5]
        turns += [{"role": "user", "content": letters[start]}, {"role": "assistant", "content": answer}]
    return turns


def validating(folder, *flags):
    return ("--validation.data.path", folder / "held_out.jsonl", "--validation.every_steps", "2", *flags)


def runner(folder, make_folder):
    """A function that runs strop sft with flags, once for each set of flags, and returns the run folder."""

    @cache
    def run(*flags):
        target = make_folder() / "run"
        done = strop("sft", folder / "sft.toml", *flags, "--run.folder", target)
        assert done.code == 0, done.err
        (target / "said.txt").write_text(done.out)
        return target

    return run
