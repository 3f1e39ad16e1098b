"""A trainer's state on disk: safetensors and JSON, no pickle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strop.types import UserError

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
Write = Callable[[Path], None]  # writes a copy made earlier into a folder that exists


def snapshot(
    parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer, *, num_steps: int, prefix: str = ""
) -> Write:
    """Copy weights and moments to host memory; what is returned writes the copy as weights.safetensors,
    optimizer.safetensors and trainer.json, each name after a prefix."""
    moments = {
        f"{moment}/{name}": optimizer.state[p][moment]
        for name, p in parameters.items()
        if p in optimizer.state
        for moment in _MOMENTS
    }
    weights, copied_moments = host_copy(parameters), host_copy(moments)

    def write(folder: Path) -> None:
        save_file(weights, folder / f"{prefix}weights.safetensors")
        save_file(copied_moments, folder / f"{prefix}optimizer.safetensors")
        (folder / f"{prefix}trainer.json").write_text(json.dumps({"num_steps": num_steps}))

    return write


def snapshot_weights(name: str, parameters: dict[str, Tensor]) -> Write:
    """Copy parameters to host memory; what is returned writes the copy as a file of this name."""
    weights = host_copy(parameters)
    return lambda folder: save_file(weights, folder / name)


def host_copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as they are now, in memory of their own that nothing else writes to."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def load(folder: Path, parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer, *, prefix: str = "") -> int:
    """Fill parameters and optimizer from a folder that a snapshot wrote; returns the number of optimizer steps made.

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
