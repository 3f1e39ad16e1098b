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
    weights, copied_moments = host_copy(parameters, ranks), host_copy(moments, ranks)

    def write(folder: Path) -> None:
        save_file(weights, folder / f"{prefix}weights.safetensors")
        save_file(copied_moments, folder / f"{prefix}optimizer.safetensors")
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
    load_weights(folder / f"{prefix}weights.safetensors", parameters, ranks)
    moments = ranks.first(lambda: load_file(folder / f"{prefix}optimizer.safetensors")) or {}
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
    return ranks.told(ranks.first(lambda: int(json.loads((folder / f"{prefix}trainer.json").read_text())["num_steps"])))


def load_weights(path: Path, parameters: dict[str, Tensor], ranks: Ranks) -> None:
    """Fill parameters from a file whose names and shapes must be theirs."""

    def read() -> dict[str, Tensor]:
        weights = load_file(path)
        check_names(weights, parameters, where=path)
        return weights

    weights = ranks.first(read) or {}
    for name, parameter in parameters.items():
        ranks.fill(parameter, weights.get(name))


def check_names(found: dict[str, Tensor], wanted: dict[str, Tensor], *, where: object) -> None:
    """Refuse weights whose names or shapes are not the wanted ones, with the first of both."""
    missing, unexpected = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or unexpected:
        raise UserError(
            f"{where}: weights do not fit the model: missing {_some(missing)}, unexpected {_some(unexpected)}."
        )
    wrong = [n for n in wanted if found[n].shape != wanted[n].shape]
    if wrong:
        shapes = [f"{n} {tuple(found[n].shape)} for {tuple(wanted[n].shape)}" for n in wrong]
        raise UserError(f"{where}: weights do not fit the model: shapes {', '.join(shapes[:3])}{_more(shapes)}.")


def _some(names: list[str]) -> str:
    return f"{names[:3]}{_more(names)}"


def _more(names: list[str]) -> str:
    return f" and {len(names) - 3} more" if len(names) > 3 else ""
