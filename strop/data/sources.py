"""Prompts from where the options say: a JSONL file, a Parquet file, or tasks that reasoning-gym generates."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from strop.config.data import DataOptions, JSONLOptions, ParquetOptions, ReasoningGymOptions
from strop.data.chat import encode_prompt
from strop.data.files import Row, read_jsonl, read_parquet
from strop.types import DataError, Prompt, UserError


@dataclass(frozen=True, slots=True)
class LoadedPrompts:
    """The prompts of a source, prompts[i].row == i."""

    prompts: tuple[Prompt, ...]
    num_skipped: int  # broken lines that were left out because data.skip_bad_lines asked for it


@dataclass(frozen=True, slots=True)
class _RawPrompt:
    where: str
    prompt: Any
    label: Any
    metadata: dict[str, Any]
    source: str | None = None


def load_prompts(
    options: DataOptions, tokenizer: Any, *, check_label: Callable[[Any], object] | None = None
) -> LoadedPrompts:
    """Read or generate the prompts of a source and tokenise them.

    Args:
        options: the table `data` of the config.
        tokenizer: a Hugging Face tokenizer.
        check_label: raises a ValueError for a label that the reward cannot use.

    Returns:
        At most `max_prompts` prompts in the order of the source.

    Raises:
        DataError: a file or a row is broken; the message names file and physical line.
        UserError: an option does not fit the tokenizer or the generator.
    """
    num_skipped = 0
    if isinstance(options, JSONLOptions):
        rows, num_skipped = read_jsonl(options.path, skip_bad_lines=options.skip_bad_lines)
        raw = _from_rows(rows[: options.max_prompts], options)
    elif isinstance(options, ParquetOptions):
        raw = _from_rows(read_parquet(options.path)[: options.max_prompts], options)
    else:
        raw = _from_reasoning_gym(options)
    prompts = []
    for number, given in enumerate(raw):
        _check_label(given, check_label)
        text, tokens = encode_prompt(
            tokenizer, given.prompt, chat=options.chat, system_prompt=options.system_prompt, where=given.where
        )
        prompts.append(Prompt(number, tokens, text, given.label, given.source, given.metadata))
    return LoadedPrompts(tuple(prompts), num_skipped)


def _from_rows(rows: Sequence[Row], options: JSONLOptions | ParquetOptions) -> Iterator[_RawPrompt]:
    _check_named_columns(rows, options)
    for row in rows:
        prompt = row.column(options.prompt_key, "data.prompt_key")
        metadata = row.values.get(options.metadata_key)
        if not isinstance(metadata, dict | None):
            kind = type(metadata).__name__
            raise DataError(f"{row.where}: {options.metadata_key!r} (data.metadata_key) must be an object, got {kind}.")
        source = row.values.get(options.source_key)
        if not isinstance(source, str | None) or source == "":
            raise DataError(f"{row.where}: {options.source_key!r} (data.source_key) must be a name, got {source!r}.")
        yield _RawPrompt(row.where, prompt, row.values.get(options.label_key), metadata or {}, source)


def _check_label(given: _RawPrompt, check: Callable[[Any], object] | None) -> None:
    try:
        if check is not None:
            check(given.label)
    except ValueError as error:
        raise DataError(f"{given.where}: {error}") from error


def _check_named_columns(rows: Sequence[Row], options: JSONLOptions | ParquetOptions) -> None:
    """A column may be absent, but one that somebody named and no row has is a slip."""
    there = dict.fromkeys(key for row in rows for key in row.values)
    for name in ("label_key", "metadata_key", "source_key"):
        key = getattr(options, name)
        if key != type(options).model_fields[name].default and key not in there:
            raise DataError(
                f"{options.path}: no row has the key {key!r}, which data.{name} names. "
                f"The keys there are: {', '.join(map(repr, there))}."
            )


def _from_reasoning_gym(options: ReasoningGymOptions) -> Iterator[_RawPrompt]:
    dataset = _reasoning_gym_dataset(options)
    source = {"dataset": options.name, "options": options.options}
    for number in range(min(options.size, options.max_prompts or options.size)):
        entry = dataset[number]
        where = f"reasoning-gym {options.name}, task {number}"
        yield _RawPrompt(where, entry["question"], entry["answer"], {**source, "entry": entry}, options.name)


def _reasoning_gym_dataset(options: ReasoningGymOptions) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise UserError(
            "data.kind = \"reasoning_gym\" needs a package that is not installed. Run: pip install 'strop[tasks]'"
        ) from error
    if options.name not in DATASETS:
        near = difflib.get_close_matches(options.name, DATASETS, n=3, cutoff=0.4)
        hint = f"The nearest: {', '.join(near)}." if near else f"There are: {', '.join(sorted(DATASETS))}."
        raise UserError(f"data.name must be a dataset of reasoning-gym, got {options.name!r}. {hint}")
    for name, instead in (("size", "data.size"), ("seed", "data.task_seed")):
        if name in options.options:
            raise UserError(f"data.options must not have {name}, got {options.options[name]!r}. Set {instead}.")
    try:
        return create_dataset(options.name, size=options.size, seed=options.task_seed, **options.options)
    except Exception as error:  # each dataset checks its settings in its own way
        raise UserError(
            f"data.options must fit reasoning-gym's {options.name}, got {options.options}: {error}"
        ) from error
