"""The critic of a run: made from the policy or from a folder, and written to one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from strop.config import ModelOptions, TorchTrainerOptions, TrainConfig
from strop.runtime.models import (
    VALUE_HEAD,
    LoadedModel,
    check_is_folder_or_name,
    load_settings,
    load_tokenizer,
    load_weights,
)
from strop.runtime.run_folder import save_tokenizer
from strop.trainers import Ranks, TorchCritic, ValueModel, body_of
from strop.types import ModelError

_OPTION = "critic.path"


def open_critic(
    config: TrainConfig, policy: LoadedModel, ranks: Ranks, note: Callable[[str], object]
) -> TorchCritic | None:
    """The critic that the config asks for, in all ranks; None where its advantage needs none. `note` is told of a head that is
    new.

    Raises:
        ModelError: it cannot be loaded, or does not read the policy's tokens.
    """
    if not config.has_critic:
        return None
    assert isinstance(config.trainer, TorchTrainerOptions)  # the options refuse another beside a critic
    path = config.critic.path
    model = ValueModel(body_of(policy.model)) if path is None else _load(path, config, policy, note)
    return ranks.make(TorchCritic, model, config.critic, config.trainer, total_steps=config.num_critic_steps)


def _load(path: str, config: TrainConfig, policy: LoadedModel, note: Callable[[str], object]) -> ValueModel:
    """A folder's body, and its value head if it has one."""
    if not path.strip():
        raise ModelError(
            f"{_OPTION} must be a Hugging Face folder or name, got {path!r}. none makes one of the policy."
        )
    check_is_folder_or_name(path, option=_OPTION)
    options = config.model.model_copy(update={"path": path})
    _check_tokens(path, load_tokenizer(options, option=_OPTION), policy.tokenizer)
    body = _load_body(options).to(next(policy.model.parameters()).device)
    if body.get_input_embeddings().num_embeddings < len(policy.tokenizer):
        raise ModelError(
            f"{_OPTION} = {path!r}: the tokenizer has {len(policy.tokenizer)} tokens, the model only "
            f"{body.get_input_embeddings().num_embeddings}."
        )
    model = ValueModel(body)
    head = Path(path) / VALUE_HEAD
    if head.exists():
        _fill_head(model, head)
    else:
        note(
            f"{_OPTION} = {path!r} has no {VALUE_HEAD}: a critic that begins with it begins by saying 0 of everything."
        )
    return model


def _load_body(options: ModelOptions) -> Any:
    """A language model is loaded whole: of its own head nothing must be said to be unexpected."""
    from transformers import AutoModel, AutoModelForCausalLM

    names = load_settings(options, option=_OPTION).architectures or ()
    if not any(name.endswith("ForCausalLM") for name in names):
        return load_weights(options, AutoModel, option=_OPTION)
    return load_weights(options, AutoModelForCausalLM, option=_OPTION).base_model


def _check_tokens(path: str, critic: Any, policy: Any) -> None:
    """Raises ModelError where an id does not mean the same token to both."""
    own, other = policy.get_vocab(), critic.get_vocab()
    if own != other:
        differing = sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))
        raise ModelError(
            f"critic.path = {path!r} must be a model with the policy's tokens; {len(differing)} differ, such as "
            f"{differing[0]!r}: {other.get(differing[0])} there, {own.get(differing[0])} in the policy's."
        )


def _fill_head(model: ValueModel, path: Path) -> None:
    """Raises ModelError where the file is none of a head for this body."""
    try:
        model.head.load_state_dict(load_file(path))
    except Exception as error:  # what safetensors and torch raise of a broken or a foreign file
        reason = " ".join(str(error).split())
        raise ModelError(f"critic.path: {path} is no value head of this model: {reason}") from error


def save_critic(critic: TorchCritic, tokenizer: Any, folder: Path) -> None:
    """Write a folder that `critic.path` may name."""
    critic.model.body.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    save_file({name: p.detach().contiguous() for name, p in critic.model.head.named_parameters()}, folder / VALUE_HEAD)
