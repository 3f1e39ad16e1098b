"""Weights as files: written by the trainer's side, read by the server's. Both sides of the format are in this one file, which
imports nothing of strop, because the server has an environment of its own.

A parcel is a folder of safetensors files and what the other side is told of them. One of kind "whole" holds every tensor under
its name. One of kind "changes" holds, of each tensor that is not what it was, the places that changed and their new values, as
NAME#at and NAME#to; where most of a tensor changed, the tensor under its name. The checksum is always that of all weights, as
they are when the parcel is applied.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FILE_BYTES = 2 << 30  # a file is written when it would grow above this: so much is held in memory at a time
AT, TO = "#at", "#to"

Shapes = dict[str, tuple[int, ...]]


class WrongWeights(ValueError):
    """What came is not what the model has."""


@dataclass(frozen=True)
class Parcel:
    """What is told of the files of a folder."""

    folder: str
    kind: str  # "whole" or "changes"
    version: str
    checksum: str  # of all weights, as `checksum_of` has it
    num_bytes: int
    base: str = ""  # checksum of the weights that changes are to be applied to

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def checksum_of(weights: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 of names, types, shapes and bytes, whatever the order."""
    found = Checksum()
    for name, tensor in weights:
        found.add(name, tensor)
    return found.value


class Checksum:
    """The same, tensor by tensor."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
        self._of[name] = digest.hexdigest()

    @property
    def value(self) -> str:
        return hashlib.sha256(json.dumps(self._of, sort_keys=True).encode()).hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def write_whole(weights: Iterable[tuple[str, Tensor]], folder: Path, version: str) -> Parcel:
    """Every tensor, in files of up to FILE_BYTES; tensors of a device are brought to the host one at a time."""
    checksum, files = Checksum(), _Files(folder)
    for name, tensor in weights:
        tensor = tensor.detach().cpu()
        checksum.add(name, tensor)
        files.add(name, tensor)
    return Parcel(str(folder), "whole", version, checksum.value, files.close())


def write_files(weights: Iterable[tuple[str, Tensor]], folder: Path) -> int:
    """The same files alone, for whoever reads them by their names; the bytes of all of them."""
    files = _Files(folder)
    for name, tensor in weights:
        files.add(name, tensor.detach().cpu())
    return files.close()


def write_changes(
    weights: Iterable[tuple[str, Tensor]], last: dict[str, Tensor], folder: Path, version: str, base: str
) -> Parcel:
    """What differs from `last`, bit for bit, which is brought up to date in place."""
    checksum, files = Checksum(), _Files(folder)
    for name, tensor in weights:
        tensor = tensor.detach().cpu()
        checksum.add(name, tensor)
        bits, before = _as_integers(tensor), _as_integers(last[name])
        at = (bits != before).nonzero().squeeze(-1)
        if at.numel() == 0:
            continue
        at = at.int() if bits.numel() < 2**31 else at
        if at.numel() * (at.element_size() + tensor.element_size()) < tensor.nbytes:
            files.add(name + AT, at)
            files.add(name + TO, tensor.reshape(-1)[at.long()])
        else:
            files.add(name, tensor)
        before.copy_(bits)
    return Parcel(str(folder), "changes", version, checksum.value, files.close(), base)


def _as_integers(tensor: Tensor) -> Tensor:
    """Flat, compared as bits: a NaN equals itself, and 0.0 is not -0.0."""
    of_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().reshape(-1).view(of_size[tensor.element_size()])


class _Files:
    """Tensors on their way into files."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._held, self._held_bytes = folder, dict[str, Tensor](), 0
        self._count, self._num_bytes = 0, 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._held and self._held_bytes + tensor.nbytes > FILE_BYTES:
            self._flush()
        self._held[name] = tensor.contiguous()
        self._held_bytes += tensor.nbytes

    def _flush(self) -> None:
        path = self._folder / f"weights-{self._count:05d}.safetensors"
        save_file(self._held, path)
        self._num_bytes += path.stat().st_size
        self._count, self._held, self._held_bytes = self._count + 1, {}, 0

    def close(self) -> int:
        """Bytes of all files."""
        if self._held or self._count == 0:
            self._flush()
        return self._num_bytes


def shapes_in(folder: Path) -> Shapes:
    """Name to shape of every tensor in the safetensors files of a folder, from their headers alone.

    Raises:
        WrongWeights: there are none.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted({folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    found: Shapes = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    if not found:
        raise WrongWeights(f"{folder} has no safetensors files, which say what tensors the model has.")
    return found


def check_fits(given: Mapping[str, tuple[int, ...]], own: Mapping[str, tuple[int, ...]], *, tied: bool = False) -> None:
    """Raises WrongWeights unless names and shapes are the same. A `tied` head follows its embedding: it may be absent."""
    head = {"lm_head.weight"} if tied else set()
    missing, unexpected = sorted(set(own) - set(given) - head), sorted(set(given) - set(own) - head)
    if missing or unexpected:
        raise WrongWeights(f"missing {missing}, unexpected {unexpected}.")
    wrong = [
        f"{n} {tuple(given[n])} for {tuple(own[n])}" for n in own if n in given and tuple(given[n]) != tuple(own[n])
    ]
    if wrong:
        raise WrongWeights(f"shapes {', '.join(wrong)}.")


class Inbox:
    """The server's side: what it takes out of parcels, checked.

    Args:
        own: name to shape of the tensors that its model has.
        tied: whether the model's head is its embedding.
    """

    def __init__(self, own: Shapes, *, tied: bool) -> None:
        self._own, self._tied = own, tied
        self._last: dict[str, Tensor] | None = None  # all weights, kept once changes came
        self.checksum = ""  # of the weights that were taken last

    def check(self, parcel: Parcel) -> None:
        """Raises WrongWeights before anything is touched: for other names or shapes, or changes of other weights."""
        if parcel.kind == "whole":
            check_fits(shapes_in(Path(parcel.folder)), self._own, tied=self._tied)
        elif parcel.base != self.checksum or self._last is None:
            raise WrongWeights(
                f"changes of weights {parcel.base[:12]} cannot be applied to weights {self.checksum[:12]}."
            )

    def take(self, parcel: Parcel, *, keep: bool) -> Iterator[tuple[str, Tensor]]:
        """All weights, one tensor after the other. `keep`: a copy stays for changes to be applied to.

        Raises:
            WrongWeights: after the last one, if they are not those that the other side wrote.
        """
        self.checksum, checksum = "", Checksum()
        if parcel.kind == "changes":
            assert self._last is not None
            _apply(self._last, Path(parcel.folder))
            stream: Iterable[tuple[str, Tensor]] = self._last.items()
        else:
            stream = _tensors(Path(parcel.folder))
            self._last = None
        kept: dict[str, Tensor] = {}
        for name, tensor in stream:
            checksum.add(name, tensor)
            if keep and self._last is None:
                kept[name] = tensor.clone()
            yield name, tensor
        if checksum.value != parcel.checksum:
            self._last = None
            raise WrongWeights(f"the checksum of what was read is {checksum.value[:12]}, not {parcel.checksum[:12]}.")
        if keep and self._last is None:
            self._last = kept
        self.checksum = checksum.value


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


def _apply(last: dict[str, Tensor], folder: Path) -> None:
    at: dict[str, Tensor] = {}
    to: dict[str, Tensor] = {}
    for name, tensor in _tensors(folder):
        if name.endswith(AT):
            at[name.removesuffix(AT)] = tensor
        elif name.endswith(TO):
            to[name.removesuffix(TO)] = tensor
        else:
            last[name] = tensor.clone()
    for name, places in at.items():
        last[name].reshape(-1)[places.long()] = to[name]
