"""Low-rank adapters (LoRA, through peft) in a model: attached, switched off for the reference, merged to be saved."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from strop.config.lora import ALL_LINEAR, LoraOptions
from strop.types import UserError

_NAME = "default"  # of the only adapter, as peft calls it
_MARK = "lora_"  # in the names of its weights
_BELOW = ".base_layer."  # in the names of those that it adapts


def check_peft(options: LoraOptions) -> None:
    """Raises UserError where adapters are asked for and peft is not installed; cheap, before a model is loaded."""
    if options.is_on and find_spec("peft") is None:
        raise UserError("lora.rank needs the package peft, which is not installed. pip install 'strop[lora]'.")


def attach_adapters(model: Any, options: LoraOptions, *, seed: int) -> None:
    """Put new adapters into a model, if they are asked for. Its own weights are frozen, the adapters float32; they add nothing
    yet, since one of the two matrices of each is 0, and the other follows from the seed.

    Raises:
        UserError: no layer has such a name, or peft cannot adapt the model.
    """
    if not options.is_on:
        return
    from peft import LoraConfig, inject_adapter_in_model

    names = list(options.target_modules)
    config = LoraConfig(
        r=options.rank or 0,
        lora_alpha=options.alpha,  # type: ignore[arg-type] - a number of any type
        lora_dropout=0.0,
        bias="none",
        target_modules=ALL_LINEAR if names == [ALL_LINEAR] else names,
        task_type="CAUSAL_LM",
    )
    devices = [d for d in {p.device for p in model.parameters()} if d.type == "cuda"]
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        torch.manual_seed(seed)
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft says that it mends what it was not told
        try:
            inject_adapter_in_model(config, model, adapter_name=_NAME)
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise UserError(f"lora.target_modules must fit {type(model).__name__}, got {names}: {reason}") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_MARK in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def has_adapters(model: Any) -> bool:
    """Were adapters attached to this model?"""
    return any(_MARK in name for name, _ in model.named_parameters())


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """The model as it was before adapters were attached, for as long as this lasts."""
    layers = [layer for _, layer in _adapted_layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _adapted_layers(model: Any) -> list[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, BaseTunerLayer)]


def merged(model: Any) -> Any:
    """The model with its adapters added to its matrices, as a copy that has none; the model itself where it has none."""
    if not has_adapters(model):
        return model
    whole = copy.deepcopy(model)
    for name, layer in _adapted_layers(whole):
        layer.merge()
        parent, _, last = name.rpartition(".")
        setattr(whole.get_submodule(parent), last, layer.get_base_layer())
    del whole.peft_config
    return whole


class WholeWeights:
    """The weights of `merged(model)` under its names, bit for bit: base + scaling B A for each that is adapted. They are those
    of whenever they are asked for, and no more than one adapted layer is a copy at a time. The model stays as it is."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        layers = dict(_adapted_layers(self._model)) if has_adapters(self._model) else {}
        for name, parameter in self._model.named_parameters():
            layer, _, own = name.rpartition(_BELOW)
            if layer in layers and own == "weight":
                yield f"{layer}.{own}", _merged_weight(layers[layer])
            elif layer in layers:
                yield f"{layer}.{own}", parameter
            elif _MARK not in name:
                yield name, parameter


@torch.no_grad()
def _merged_weight(layer: Any) -> Tensor:
    alone = copy.deepcopy(layer)
    alone.merge()
    return alone.get_base_layer().weight.detach()


def save_adapters(model: Any, folder: Path) -> None:
    """Write the adapters alone, as a folder that peft reads."""
    from peft import get_peft_model_state_dict

    config = model.peft_config[_NAME]
    weights = get_peft_model_state_dict(model, adapter_name=_NAME)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {f"base_model.model.{name}": w.detach().contiguous() for name, w in weights.items()},
        folder / "adapter_model.safetensors",
    )
    config.save_pretrained(folder)
