"""The global random states of Python, numpy and torch: what a user's reward function or filter draws from.

strop itself draws nothing from them; its samples follow from the seed, the step and the place in it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

_FILE = "random.json"  # in a checkpoint


def random_states() -> dict[str, Any]:
    """All of them as they are now, as JSON can hold them."""
    name, keys, *rest = np.random.get_state()
    found = {
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), *rest],  # type: ignore[union-attr]
        "torch": _as_text(torch.get_rng_state()),
    }
    if torch.cuda.is_initialized():
        found["cuda"] = [_as_text(state) for state in torch.cuda.get_rng_state_all()]
    return found


def set_random_states(states: dict[str, Any]) -> None:
    """Go on from states that `random_states` gave. Those of GPUs are set where there are as many as there were."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_from_text(states["torch"]))
    cuda = states.get("cuda", [])
    if cuda and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_from_text(text) for text in cuda])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Around a run: its random states begin with its seed, and those of the caller come back afterwards."""
    before = random_states()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        set_random_states(before)


def write_random_states(folder: Path, states: dict[str, Any]) -> None:
    """As a file of a checkpoint."""
    (folder / _FILE).write_text(json.dumps(states), encoding="utf-8")


def restore_random_states(folder: Path) -> bool:
    """Go on from those of a checkpoint. False where it has none, as those of earlier versions."""
    file = folder / _FILE
    if not file.exists():
        return False
    set_random_states(json.loads(file.read_text(encoding="utf-8")))
    return True


def _as_text(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
