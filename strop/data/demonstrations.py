"""Demonstrations for supervised fine-tuning: a prompt and the response to learn, as one sequence of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strop.config.data import DemonstrationOptions
from strop.data.chat import encode_prompt
from strop.data.files import Row, read_jsonl
from strop.types import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One sequence to learn from.

    >>> Demonstration(row=0, tokens=(5, 6, 9, 2), response_mask=(False, False, True, True)).tokens
    (5, 6, 9, 2)
    """

    row: int  # its place in the file, counted from 0
    tokens: tuple[int, ...]  # the prompt's, then the response's, the end token last
    response_mask: tuple[bool, ...]  # True for the response's tokens, the end token among them


@dataclass(frozen=True, slots=True)
class LoadedDemonstrations:
    """The demonstrations of a file, demonstrations[i].row == i."""

    demonstrations: tuple[Demonstration, ...]
    num_skipped: int  # broken lines that were left out because data.skip_bad_lines asked for it


def load_demonstrations(options: DemonstrationOptions, tokenizer: Any) -> LoadedDemonstrations:
    """Read demonstrations and tokenise them.

    Args:
        options: the table `data` of the config of `strop sft`.
        tokenizer: a Hugging Face tokenizer with an end token.

    Returns:
        The demonstrations in the order of the file.

    Raises:
        ConfigError: the tokenizer has no end token, or an option does not fit it.
        DataError: the file or a row is broken; the message names file and physical line.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "model.path must have a tokenizer with an end token, got one without. "
            "A model that never learns to end would answer up to the length limit."
        )
    rows, num_skipped = read_jsonl(options.path, skip_bad_lines=options.skip_bad_lines)
    found = tuple(_demonstration(number, row, options, tokenizer) for number, row in enumerate(rows))
    return LoadedDemonstrations(found, num_skipped)


def _demonstration(number: int, row: Row, options: DemonstrationOptions, tokenizer: Any) -> Demonstration:
    prompt = row.column(options.prompt_key, "data.prompt_key")
    response = row.column(options.response_key, "data.response_key")
    if not isinstance(response, str) or not response:
        given = "empty text" if response == "" else type(response).__name__
        raise DataError(f"{row.where}: the response ({options.response_key!r}) must be text, got {given}.")
    _, head = encode_prompt(tokenizer, prompt, chat=options.chat, system_prompt=options.system_prompt, where=row.where)
    tail = tuple(tokenizer.encode(response, add_special_tokens=False))
    if not tail:
        raise DataError(f"{row.where}: the response {response!r} has no tokens.")
    if tail[-1] != tokenizer.eos_token_id:
        tail = (*tail, tokenizer.eos_token_id)
    return Demonstration(number, head + tail, (False,) * len(head) + (True,) * len(tail))
