"""Options that a machine may have nothing to vary for."""

from __future__ import annotations

import os

import torch

_OF_PROCESSES = ("trainer.num_processes", "trainer.tensor_parallel", "trainer.context_parallel")


def why_not_here(path: str) -> str:
    """Why no other value of an option can act on this machine; empty where one can."""
    if path == "trainer.num_threads" and _num_cores() == 1:
        return "this process may use one core only"
    if path in _OF_PROCESSES and torch.cuda.device_count() == 1:
        return "this machine has one GPU"
    if path in ("model.device", "distillation.teacher_device") and not torch.cuda.is_available():
        return "this machine has no device but the CPU"
    if path in ("engine.num_replicas", "rollout.num_scorers"):
        return "these are actors of a cluster, which an audit does not start"
    if path == "engine.transfer" and not torch.cuda.is_available():
        return "this machine has no GPU to carry weights from"
    return ""


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
