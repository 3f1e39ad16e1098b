"""Products of float32 matrices on processors whose second half torch's own library leaves idle."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Multiplications below which a call costs more than it saves (measured: 2 to 4 million). A shape that is new costs some .4 ms,
# and those of a step that learns seldom come again: as much as 37 million save.
LEAST_WORK, LEAST_WORK_TO_LEARN = 1 << 22, 1 << 25

# oneDNN keeps what it works with for the shapes that it saw last, 1024 of them where nobody says how many: gigabytes. Two
# caches, which look here when they are first used.
NUM_KEPT_SHAPES = 32
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, str(NUM_KEPT_SHAPES))


@cache
def has_better_library() -> bool:
    """True where oneDNN, which torch brings along, multiplies float32 faster than what torch calls for it.

    torch's x86 wheels call MKL, which on AMD's processors stays at vectors of 256 bits; oneDNN uses those of 512 where there
    are any. Measured on Zen 5: 2.2 times as fast. By the kind of the processor alone, so that every process chooses alike.
    """
    has_both = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    if not has_both or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        is_amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # another system
        return False
    return is_amd and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, by oneDNN where that is faster: x weight^T + bias.

    Args: x E* x I, weight O x I, bias O or None; all carry gradient, once. Returns E* x O.

    Large products of plain float32 tensors on the CPU alone go another way; `torch.backends.mkldnn.enabled = False` keeps
    all of them from it.

    >>> linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])).tolist()
    [[11.0, 17.0]]
    """
    if not _goes_better(x, weight):
        return torch.nn.functional.linear(x, weight, bias)
    if torch.is_grad_enabled():
        return _Linear.apply(x, weight, bias)
    return _product(x, weight, bias)


def _goes_better(x: Tensor, weight: Tensor) -> bool:
    least = LEAST_WORK_TO_LEARN if torch.is_grad_enabled() else LEAST_WORK
    if x.numel() * weight.shape[0] < least or not is_plain(x, weight):
        return False
    return has_better_library() and torch.backends.mkldnn.enabled  # type: ignore[attr-defined]


def is_plain(*tensors: Tensor) -> bool:
    """Are all of float32, on the CPU, and none spread over ranks?"""
    return all(
        type(one) in (Tensor, torch.nn.Parameter) and one.dtype == torch.float32 and one.device.type == "cpu"
        for one in tensors
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            _product(grad, weight.T) if needs_x else None,
            _product(rows.T, x.reshape(-1, x.shape[-1]).T) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


class Linear(torch.nn.Linear):
    """A linear layer whose products are `linear`'s."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def use_better_library(model: torch.nn.Module) -> None:
    """The model's linear layers multiply by `linear`, those of other classes than torch's own as before. Weights stay the same
    tensors."""
    if has_better_library():
        for module in model.modules():
            if type(module) is torch.nn.Linear:
                module.__class__ = Linear
