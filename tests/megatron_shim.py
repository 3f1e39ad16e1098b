"""Megatron-Core on a machine without a GPU: what it asks of CUDA is done on the CPU. It shows wiring and mathematics, nothing
of CUDA. For tests alone: strop itself refuses to begin."""

import sys
from importlib.util import find_spec
from unittest.mock import MagicMock

import torch


def is_there():
    """Can Megatron-Core be imported?"""
    return find_spec("megatron") is not None


def _on_cpu(make):
    def made(*args, **more):
        if str(more.get("device", "")).startswith("cuda"):
            more["device"] = "cpu"
        return make(*args, **more)

    return made


class _Torch:
    """torch as Megatron-Core's modules see it: what they make on a GPU is made on the CPU."""

    def __init__(self):
        for name in ("zeros", "ones", "empty", "full", "tensor", "arange"):
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name):
        return getattr(torch, name)


def _cuda_name(type_of):
    def named(self, *args, **more):
        found = type_of(self, *args, **more)
        return found if args or more else found.replace("torch.", "torch.cuda.", 1)

    return named


def install():
    """From now on, in this process."""
    if getattr(torch, "_is_shimmed", False):
        return
    torch._is_shimmed = True
    torch.Tensor.type = _cuda_name(torch.Tensor.type)
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_: MagicMock()
    from strop.trainers.megatron import environment

    environment.load_megatron()
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.zeros(0)
    random._set_cuda_rng_state = lambda *_, **__: None
    seen = _Torch()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and getattr(module, "torch", None) is torch:
            module.torch = seen
    environment.check_device = lambda device: None
