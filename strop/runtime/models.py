"""Model and tokenizer from a folder, device and threads: the one file where hardware is chosen."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from strop.config import ModelOptions
from strop.engines import max_positions
from strop.layers import use_lean_layers
from strop.products import use_better_library
from strop.types import DataError, ModelError, UserError

VALUE_HEAD = "value_head.safetensors"  # in the folder of a critic


@dataclass(frozen=True)
class LoadedModel:
    """A language model on its device, its tokenizer, and the ids that end a response."""

    model: Any
    tokenizer: Any
    stop_token_ids: frozenset[int]


def choose_device(name: str, *, option: str = "model.device") -> torch.device:
    """The device that an option names; "auto" is a GPU if there is one. GPU branches: not run in this project's CI."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"{option} must be a device of this machine, got {name!r}: {error}") from None
    if device.type == "meta":
        raise ModelError(f"{option} must be a device of this machine, got 'meta': it holds no numbers.")
    return torch.device("cpu") if device.type == "cpu" else device  # there is one, whatever number it is given


def set_threads(num_threads: int | None, *, num_processes: int = 1) -> int:
    """CPU threads of torch: as many as asked, and never more than the cores that this process may use; left to follow, its
    part of them, where so many processes work side by side."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    side_by_side = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))  # of a launcher, which knows other machines
    count = min(num_threads or max(1, cores // side_by_side), cores)
    torch.set_num_threads(count)
    return count


def load_model(
    options: ModelOptions, *, option: str = "model.path", device_option: str = "model.device"
) -> LoadedModel:
    """Load model and tokenizer. `option` and `device_option` are what messages call path and device.

    Raises:
        ModelError: the folder is missing or broken, or has no end token or tokenizer.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    path = options.path
    check_is_folder_or_name(path, option=option)
    if (Path(path) / VALUE_HEAD).exists():  # of one with a tied head nothing else shows that it has none
        raise ModelError(f"{option} must be a language model, got {path!r}: it is a critic, for critic.path alone.")
    device = choose_device(options.device, option=device_option)
    tokenizer = load_tokenizer(options, option=option)
    model = load_weights(options, AutoModelForCausalLM, option=option).to(device)
    if len(tokenizer) > vocab_size(model):
        raise ModelError(
            f"{option} = {path!r}: the tokenizer has {len(tokenizer)} tokens, the model only {vocab_size(model)}."
        )
    return LoadedModel(model, tokenizer, _stop_token_ids(model, tokenizer, path, option))


def check_is_folder_or_name(path: str, *, option: str = "model.path") -> None:
    """Raises ModelError for a path at which there is nothing."""
    if not _may_be_a_name(path) and not Path(path).is_dir():
        raise ModelError(f"{option} must be a Hugging Face folder or name, got {path!r}: there is no such folder.")


def load_tokenizer(options: ModelOptions, *, option: str = "model.path") -> Any:
    """The tokenizer of a model folder; `option` is what a message calls the folder."""
    from transformers import AutoTokenizer

    with _loading(options.path, "tokenizer", option):
        return AutoTokenizer.from_pretrained(options.path, trust_remote_code=options.trust_remote_code)


def load_settings(options: ModelOptions, *, option: str = "model.path") -> Any:
    """What a model folder's config.json says; `option` is what a message calls the folder."""
    from transformers import AutoConfig

    with _loading(options.path, "config.json", option):
        return AutoConfig.from_pretrained(options.path, trust_remote_code=options.trust_remote_code)


@contextmanager
def _loading(path: str, part: str, option: str) -> Iterator[None]:
    """What the libraries below raise, which is everything from OSError to SafetensorError, as a ModelError."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        if not Path(path).exists():
            what = "there is no such folder, and no model of that name could be had"
            raise ModelError(f"{option} must be a Hugging Face folder or name, got {path!r}: {what}.") from error
        lines = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
        raise ModelError(f"{option} = {path!r} cannot be loaded ({part}): {type(error).__name__}: {lines}") from error


def load_weights(options: ModelOptions, auto_class: Any, *, option: str = "model.path") -> Any:
    """The model with every one of its weights from the folder: where one is missing, transformers draws it at random.

    Args: auto_class, of transformers; option, what a message calls the folder.
    """
    with _loading(options.path, "model", option):
        return _all_weights(options, auto_class, option)


def _all_weights(options: ModelOptions, auto_class: Any, option: str) -> Any:
    generation = Path(options.path) / "generation_config.json"
    if generation.exists():
        json.loads(generation.read_text(encoding="utf-8"))  # transformers goes on without one that is broken
    model, found = auto_class.from_pretrained(
        options.path,
        dtype=getattr(torch, options.dtype),
        trust_remote_code=options.trust_remote_code,
        ignore_mismatched_sizes=True,  # to name them here
        output_loading_info=True,
    )
    faults = [f"no weights for {name}" for name in sorted(found["missing_keys"])]
    for name, stored, wanted in sorted(found["mismatched_keys"]):
        faults.append(f"{name} is {tuple(stored)} and must be {tuple(wanted)}")
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ModelError(f"{option} = {options.path!r}: weights do not fit config.json: {', '.join(faults[:3])}{more}.")
    use_better_library(model)
    if options.dtype == "float32":
        use_lean_layers(model)
    return model


def _may_be_a_name(path: str) -> bool:
    """A name is owner/model or model; what begins like a path, or lies in a folder that is here, is none."""
    above = path.partition("/")[0]
    return path.count("/") <= 1 and not path.startswith((".", "/", "~")) and not ("/" in path and Path(above).is_dir())


def _stop_token_ids(model: Any, tokenizer: Any, path: str, option: str) -> frozenset[int]:
    """Every id that the tokenizer, the model's config or its generation config calls the end, and that can be sampled."""
    ids: set[int] = set()
    for found in (tokenizer.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id):
        ids |= set(found if isinstance(found, (list, tuple)) else [found]) - {None}
    possible = {token for token in ids if 0 <= token < vocab_size(model)}
    if not possible:
        named = f"only {sorted(ids)}, which are not in its vocabulary" if ids else "none"
        raise ModelError(
            f"{option} = {path!r} must name an end token, or no response could ever stop; it names {named}. "
            "Set eos_token_id."
        )
    return frozenset(possible)


def vocab_size(model: Any) -> int:
    return model.get_input_embeddings().weight.shape[0]


def check_stop_token_ids(loaded: LoadedModel, ids: Iterable[int], *, option: str = "rollout.stop_token_ids") -> None:
    """Refuse end tokens that the model can never sample.

    Raises:
        UserError: with the ids and the size of the vocabulary.
    """
    size = vocab_size(loaded.model)
    wrong = sorted(token for token in ids if not 0 <= token < size)
    if wrong:
        raise UserError(f"{option} must be token ids from 0 to {size - 1}, the model's vocabulary, got {wrong}.")


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
        left = limit - num_tokens
        fits = f" {option} may be up to {left}." if option and left > 0 else ""
        raise DataError(f"{name} has {num_tokens} tokens;{more} it does not fit the model's {limit} positions.{fits}")
