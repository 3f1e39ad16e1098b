"""A trainer's state on disk: safetensors and JSON, no pickle."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strop.types import UserError

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def save(
    folder: Path, parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer, *, num_steps: int, prefix: str = ""
) -> None:
    """Write weights.safetensors, optimizer.safetensors and trainer.json into a folder that exists, each name after a prefix."""
    save_weights(folder / f"{prefix}weights.safetensors", parameters)
    moments = {
        f"{moment}/{name}": optimizer.state[p][moment].contiguous()
        for name, p in parameters.items()
        if p in optimizer.state
        for moment in _MOMENTS
    }
    save_file(moments, folder / f"{prefix}optimizer.safetensors")
    (folder / f"{prefix}trainer.json").write_text(json.dumps({"num_steps": num_steps}))


def load(folder: Path, parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer, *, prefix: str = "") -> int:
    """Fill parameters and optimizer from a folder that `save` wrote; returns the number of optimizer steps made.

    Raises:
        UserError: names or shapes differ.
    """
    load_weights(folder / f"{prefix}weights.safetensors", parameters)
    moments = load_file(folder / f"{prefix}optimizer.safetensors")
    optimizer.state.clear()  # moments of steps that the saved trainer never made
    for name, parameter in parameters.items():
        if f"step/{name}" in moments:
            found = {moment: moments[f"{moment}/{name}"] for moment in _MOMENTS}
            # a fused AdamW has its count of steps beside the moments; the copy, because a file's tensors may share memory
            optimizer.state[parameter] = {
                moment: value.to(parameter.device, copy=True) for moment, value in found.items()
            }
    return int(json.loads((folder / f"{prefix}trainer.json").read_text())["num_steps"])


def save_weights(path: Path, parameters: dict[str, Tensor]) -> None:
    """Write parameters as they are now."""
    save_file({name: p.detach().contiguous() for name, p in parameters.items()}, path)


def load_weights(path: Path, parameters: dict[str, Tensor]) -> None:
    """Fill parameters from a file whose names and shapes must be theirs."""
    weights = load_file(path)
    check_names(weights, parameters, where=path)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])


def check_names(found: dict[str, Tensor], wanted: dict[str, Tensor], *, where: object) -> None:
    """Refuse weights whose names or shapes are not the wanted ones, with the lists of both."""
    missing, unexpected = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or unexpected:
        raise UserError(f"{where}: weights do not fit the model: missing {missing}, unexpected {unexpected}.")
    wrong = [n for n in wanted if found[n].shape != wanted[n].shape]
    if wrong:
        shapes = [f"{n} {tuple(found[n].shape)} for {tuple(wanted[n].shape)}" for n in wrong]
        raise UserError(f"{where}: weights do not fit the model: shapes {', '.join(shapes)}.")
