"""Model and tokenizer from a folder, device and threads: the one file where hardware is chosen."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from strop.config import ModelOptions
from strop.engines import max_positions
from strop.types import DataError, ModelError


@dataclass(frozen=True)
class LoadedModel:
    """A language model on its device, its tokenizer, and the ids that end a response."""

    model: Any
    tokenizer: Any
    stop_token_ids: frozenset[int]


def choose_device(name: str) -> torch.device:
    """The device that `model.device` names; "auto" is a GPU if there is one. GPU branches: not run in this project's CI."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"model.device must be a device of this machine, got {name!r}: {error}") from None
    return device


def set_threads(num_threads: int | None) -> int:
    """CPU threads of torch: as asked, or as many cores as this process may use."""
    count = num_threads or len(
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    torch.set_num_threads(count)
    return count


def load_model(options: ModelOptions) -> LoadedModel:
    """Load model and tokenizer.

    Raises:
        ModelError: the folder is missing or broken, or has no end token or tokenizer.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    path = options.path
    if not _may_be_a_name(path) and not Path(path).is_dir():
        raise ModelError(f"model.path must be a Hugging Face folder or name, got {path!r}: there is no such folder.")
    device = choose_device(options.device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=options.trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, options.dtype), trust_remote_code=options.trust_remote_code
        )
    except Exception as error:  # the libraries below raise everything from OSError to SafetensorError
        if not Path(path).exists():
            what = "there is no such folder, and no model of that name could be had"
            raise ModelError(f"model.path must be a Hugging Face folder or name, got {path!r}: {what}.") from error
        first_line = str(error).strip().split("\n")[0]
        raise ModelError(f"model.path = {path!r} cannot be loaded: {type(error).__name__}: {first_line}") from error
    vocab = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > vocab:
        raise ModelError(f"model.path = {path!r}: the tokenizer has {len(tokenizer)} tokens, the model only {vocab}.")
    return LoadedModel(model.to(device), tokenizer, _stop_token_ids(model, tokenizer, path))


def _may_be_a_name(path: str) -> bool:
    """A name is owner/model or model; what begins like a path, or lies in a folder that is here, is none."""
    above = path.partition("/")[0]
    return path.count("/") <= 1 and not path.startswith((".", "/", "~")) and not ("/" in path and Path(above).is_dir())


def _stop_token_ids(model: Any, tokenizer: Any, path: str) -> frozenset[int]:
    """Every id that the tokenizer, the model's config or its generation config calls the end."""
    ids: set[int] = set()
    for found in (tokenizer.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id):
        ids |= set(found if isinstance(found, (list, tuple)) else [found]) - {None}
    if not ids:
        raise ModelError(f"model.path = {path!r} names no end token: no response could ever stop. Set eos_token_id.")
    return frozenset(ids)


def has_finite_weights(model: Any) -> bool:
    """False for a model that must not replace a good one."""
    return all(bool(torch.isfinite(p).all()) for p in model.parameters())


def check_length(model: Any, name: str, num_tokens: int, *, option: str = "", max_response_tokens: int = 0) -> None:
    """Refuse a sequence that the model has no positions for, before a run stops in the middle because of it.

    Raises:
        DataError: with both numbers.
    """
    limit = max_positions(model)
    if limit is not None and num_tokens + max_response_tokens > limit:
        more = f" with {option} = {max_response_tokens}" if max_response_tokens else ""
        raise DataError(f"{name} has {num_tokens} tokens;{more} it does not fit the model's {limit} positions.")
