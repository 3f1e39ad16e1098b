"""Demonstrations for supervised fine-tuning: one sequence of tokens each, and which of them are learned."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from strop.config.data import DemonstrationOptions
from strop.data.chat import encode_prompt, is_templated, prompt_messages
from strop.data.conversations import encode_conversation
from strop.data.files import Row, read_jsonl, read_parquet
from strop.types import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One sequence to learn from.

    >>> Demonstration(row=0, tokens=(5, 6, 9, 2), response_mask=(False, False, True, True)).tokens
    (5, 6, 9, 2)
    """

    row: int  # its place in the file, counted from 0
    tokens: tuple[int, ...]
    response_mask: tuple[bool, ...]  # True for what is learned, the end token of a response or turn among it


@dataclass(frozen=True, slots=True)
class LoadedDemonstrations:
    """The demonstrations of a file, in its order."""

    demonstrations: tuple[Demonstration, ...]
    num_skipped: int  # broken lines that were left out because data.skip_bad_lines asked for it
    num_dropped: int = 0  # longer than allowed, left out
    num_truncated: int = 0  # longer than allowed, cut
    num_conversations: int = 0  # of the rows; the others are a prompt and a response


def load_demonstrations(
    options: DemonstrationOptions,
    tokenizer: Any,
    *,
    table: str = "data",
    max_positions: int | None = None,
    watch: Callable[[list[Row]], Iterable[Row]] | None = None,
) -> LoadedDemonstrations:
    """Read demonstrations and tokenise them.

    Args:
        options: the table of the config of `strop sft`.
        tokenizer: a Hugging Face tokenizer with an end token.
        table: its name, for messages.
        max_positions: tokens that the model can read; None means no limit.
        watch: hands on the rows one by one, and may show how far it is.

    Raises:
        ConfigError: the tokenizer has no end token, or an option does not fit it or the model.
        DataError: the file or a row is broken, or a row is too long; the message names file and physical line.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "model.path must have a tokenizer with an end token, got one without. "
            "A model that never learns to end would answer up to the length limit."
        )
    limit = _limit(options, table, max_positions)
    num_skipped = 0
    if options.kind == "jsonl":
        rows, num_skipped = read_jsonl(options.path, skip_bad_lines=options.skip_bad_lines)
    else:
        rows = read_parquet(options.path)
    rows = rows[: options.max_rows]
    kept: list[Demonstration] = []
    left_out: list[Demonstration] = []
    num_truncated = 0
    for number, row in enumerate(rows if watch is None else watch(rows)):
        found = _demonstration(number, row, options, table, tokenizer)
        fitting = _fitted(found, limit, options, table, row.where)
        if fitting is None:
            left_out.append(found)
        else:
            kept.append(fitting)
            num_truncated += fitting is not found
    if limit is not None and not kept:
        raise _nothing_left(left_out, limit, options, table, max_positions)
    num_conversations = sum(row.values.get(options.messages_key) is not None for row in rows)
    return LoadedDemonstrations(tuple(kept), num_skipped, len(left_out), num_truncated, num_conversations)


def _limit(options: DemonstrationOptions, table: str, max_positions: int | None) -> int | None:
    given = options.max_length_tokens
    if given is not None and max_positions is not None and given > max_positions:
        raise ConfigError(
            f"{table}.max_length_tokens must be at most the model's {max_positions} positions, got {given}."
        )
    return max_positions if given is None else given


def _nothing_left(
    found: list[Demonstration], limit: int, options: DemonstrationOptions, table: str, max_positions: int | None
) -> DataError:
    """What is wrong where none is short enough, and what of it can be mended."""
    can_cut = options.too_long == "drop" and any(_learns_within(d, limit) for d in found)
    if options.too_long == "drop":
        needed = min(len(d.tokens) for d in found)
        what = f"all are longer than {limit} tokens, the shortest has {needed}, and {table}.too_long is drop"
    else:
        needed = min(d.response_mask.index(True, 1) for d in found) + 1
        what = f"what is learned of each begins after {limit} tokens, the first at token {needed}"
    ways = [f'set {table}.too_long = "truncate"'] if can_cut else []
    if max_positions is None or needed <= max_positions:  # then the limit is an option's
        ways.insert(0, f"raise {table}.max_length_tokens to {needed} or more")
    elif not can_cut:
        ways.append(f"shorten them, or take a model with more than {max_positions} positions")
    todo = ", or ".join(ways)
    return DataError(f"{options.path}: none of the {len(found)} rows is left: {what}. {todo[0].upper()}{todo[1:]}.")


def _learns_within(found: Demonstration, limit: int) -> bool:
    """Whether something is learned of its beginning; the first token has nothing that it would follow from."""
    return any(found.response_mask[1:limit])


def _demonstration(number: int, row: Row, options: DemonstrationOptions, table: str, tokenizer: Any) -> Demonstration:
    if row.values.get(options.messages_key) is None:
        return _answer(number, row, options, table, tokenizer)
    if row.values.get(options.response_key) is not None:
        raise DataError(
            f"{row.where}: has a conversation ({options.messages_key!r}) and a response ({options.response_key!r}). "
            f"Name in {table}.messages_key or {table}.response_key a column that is not there."
        )
    return _conversation(number, row, row.values[options.messages_key], options.train_on, options, table, tokenizer)


def _conversation(
    number: int, row: Row, messages: Any, train_on: str, options: DemonstrationOptions, table: str, tokenizer: Any
) -> Demonstration:
    tokens, mask = encode_conversation(
        tokenizer,
        messages,
        train_on=train_on,
        chat=options.chat,
        system_prompt=options.system_prompt,
        where=row.where,
        table=table,
    )
    return Demonstration(number, tokens, mask)


def _answer(number: int, row: Row, options: DemonstrationOptions, table: str, tokenizer: Any) -> Demonstration:
    """A prompt, and the response after it, which alone is learned; with train_on = "all" the prompt is too.

    Where the prompt goes through the chat template, so does the response, as the message that comes next.
    """
    if not {options.messages_key, options.prompt_key, options.response_key} & row.values.keys():
        there = ", ".join(map(repr, row.values)) or "none"
        raise DataError(
            f"{row.where}: has neither a conversation nor a prompt: no key {options.messages_key!r} ({table}.messages_key), "
            f"no key {options.prompt_key!r} ({table}.prompt_key). Its keys: {there}."
        )
    prompt = row.column(options.prompt_key, f"{table}.prompt_key")
    response = row.column(options.response_key, f"{table}.response_key")
    if not isinstance(response, str) or not response:
        given = "empty text" if response == "" else type(response).__name__
        raise DataError(f"{row.where}: the response ({options.response_key!r}) must be text, got {given}.")
    messages = prompt_messages(prompt, row.where)
    if is_templated(tokenizer, prompt, options.chat, row.where, table):
        said = {
            "role": "assistant",
            "content": response.removesuffix(tokenizer.eos_token),
        }  # the template writes an end
        train_on = "all" if options.train_on == "all" else "last"
        return _conversation(number, row, [*messages, said], train_on, options, table, tokenizer)
    _, head = encode_prompt(
        tokenizer, prompt, chat=options.chat, system_prompt=options.system_prompt, where=row.where, table=table
    )
    tail = tuple(tokenizer.encode(response, add_special_tokens=False))
    if not tail:
        raise DataError(f"{row.where}: the response {response!r} has no tokens.")
    if tail[-1] != tokenizer.eos_token_id:
        tail = (*tail, tokenizer.eos_token_id)
    return Demonstration(number, head + tail, (options.train_on == "all",) * len(head) + (True,) * len(tail))


def _fitted(
    found: Demonstration, limit: int | None, options: DemonstrationOptions, table: str, where: str
) -> Demonstration | None:
    """The demonstration if it is short enough, cut to the limit if that is asked for; None where it is left out."""
    length = len(found.tokens)
    if limit is None or length <= limit:
        return found
    if options.too_long == "error":
        whose = "the model's positions" if options.max_length_tokens is None else f"{table}.max_length_tokens"
        raise DataError(
            f"{where}: the demonstration has {length} tokens and may have {limit} ({whose}). "
            f'Set {table}.too_long = "drop" or "truncate", or shorten it.'
        )
    if options.too_long == "drop" or not _learns_within(found, limit):
        return None
    return replace(found, tokens=found.tokens[:limit], response_mask=found.response_mask[:limit])
