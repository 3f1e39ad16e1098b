"""A trainer's state on disk: safetensors and JSON, no pickle."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strop.trainers.ranks import Ranks
from strop.types import UserError

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
Write = Callable[[Path], None]  # writes a copy made earlier into a folder that exists


def snapshot(
    parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer, ranks: Ranks, *, num_steps: int, prefix: str = ""
) -> Write:
    """Copy weights and moments to rank 0's host memory; what is returned writes the copy as weights.safetensors,
    optimizer.safetensors and trainer.json, each name after a prefix. The files do not depend on the number of ranks."""
    moments = {
        f"{moment}/{name}": optimizer.state[p][moment]
        for name, p in parameters.items()
        if p in optimizer.state
        for moment in _MOMENTS
    }
    return writer(host_copy(parameters, ranks), host_copy(moments, ranks), num_steps=num_steps, prefix=prefix)


def writer(weights: dict[str, Tensor], moments: dict[str, Tensor], *, num_steps: int, prefix: str = "") -> Write:
    """What writes a copy of weights, of moments as moment/name, and of the number of steps into a folder."""

    def write(folder: Path) -> None:
        save_file(weights, folder / f"{prefix}weights.safetensors")
        save_file(moments, folder / f"{prefix}optimizer.safetensors")
        (folder / f"{prefix}trainer.json").write_text(json.dumps({"num_steps": num_steps}))

    return write


def snapshot_weights(name: str, parameters: dict[str, Tensor], ranks: Ranks) -> Write:
    """Copy parameters to rank 0's host memory; what is returned writes the copy as a file of this name."""
    weights = host_copy(parameters, ranks)
    return lambda folder: save_file(weights, folder / name)


def host_copy(tensors: dict[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Whole tensors as they are now, in memory of their own that nothing else writes to; rank 0 alone gets any."""
    found = {}
    for name, tensor in tensors.items():
        whole = ranks.full(tensor.detach())
        if ranks.is_first:
            found[name] = whole.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return found


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of what this rank has of them, in host memory."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def load(
    folder: Path, parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer, ranks: Ranks, *, prefix: str = ""
) -> int:
    """Fill parameters and optimizer from a folder that a snapshot wrote, which rank 0 alone reads; returns the number of
    optimizer steps made.

    Raises:
        UserError: names or shapes differ.
    """
    weights, moments, num_steps = read(folder, shapes(parameters), ranks, prefix=prefix)
    fill(parameters, weights, ranks)
    stepped = set(ranks.told([name for name in parameters if f"step/{name}" in moments]))
    optimizer.state.clear()  # moments of steps that the saved trainer never made
    for name, parameter in parameters.items():
        if name not in stepped:
            continue
        # a fused AdamW has its count of steps beside the moments
        found = {"step": ranks.told(moments.get(f"step/{name}")).to(parameter.device, copy=True)}
        for moment in _MOMENTS[:2]:
            found[moment] = torch.zeros_like(parameter, requires_grad=False)
            ranks.fill(found[moment], moments.get(f"{moment}/{name}"))
        optimizer.state[parameter] = {moment: found[moment] for moment in _MOMENTS}
    return num_steps


def read(
    folder: Path, wanted: Mapping[str, torch.Size], ranks: Ranks, *, prefix: str = ""
) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Weights, moments and the number of steps that a snapshot wrote. Rank 0 alone gets tensors.

    Raises:
        UserError: names or shapes are not the wanted ones.
    """
    weights = ranks.first(lambda: read_weights(folder / f"{prefix}weights.safetensors", wanted)) or {}
    moments = ranks.first(lambda: load_file(folder / f"{prefix}optimizer.safetensors")) or {}
    said = ranks.first(lambda: json.loads((folder / f"{prefix}trainer.json").read_text())) or {}
    return weights, moments, ranks.told(int(said.get("num_steps", 0)))


def read_weights(path: Path, wanted: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """A file of weights whose names and shapes must be the wanted ones."""
    weights = load_file(path)
    check_names(weights, wanted, where=path)
    return weights


def load_weights(path: Path, parameters: dict[str, Tensor], ranks: Ranks) -> None:
    """Fill parameters from a file whose names and shapes must be theirs."""
    fill(parameters, ranks.first(lambda: read_weights(path, shapes(parameters))) or {}, ranks)


def fill(parameters: dict[str, Tensor], values: dict[str, Tensor], ranks: Ranks) -> None:
    """Set parameters to what rank 0 has for them."""
    for name, parameter in parameters.items():
        ranks.fill(parameter, values.get(name))


def shapes(tensors: dict[str, Tensor]) -> dict[str, torch.Size]:
    """Of whole tensors."""
    return {name: tensor.shape for name, tensor in tensors.items()}


def check_names(found: Mapping[str, Tensor], wanted: Mapping[str, torch.Size], *, where: object) -> None:
    """Refuse weights whose names or shapes are not the wanted ones, with the first of both."""
    missing, unexpected = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or unexpected:
        raise UserError(
            f"{where}: weights do not fit the model: missing {_some(missing)}, unexpected {_some(unexpected)}."
        )
    wrong = [n for n in wanted if found[n].shape != wanted[n]]
    if wrong:
        shapes = [f"{n} {tuple(found[n].shape)} for {tuple(wanted[n])}" for n in wrong]
        raise UserError(f"{where}: weights do not fit the model: shapes {', '.join(shapes[:3])}{_more(shapes)}.")


def _some(names: list[str]) -> str:
    return f"{names[:3]}{_more(names)}"


def _more(names: list[str]) -> str:
    return f" and {len(names) - 3} more" if len(names) > 3 else ""
