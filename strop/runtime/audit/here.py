"""Options that a machine may have nothing to vary for."""

from __future__ import annotations

import os

import torch

from strop.runtime.models import choose_device
from strop.trainers.megatron import check_megatron
from strop.types import UserError

DIVIDES_PROCESSES = ("trainer.tensor_parallel", "trainer.context_parallel", "trainer.pipeline_parallel")
DIVIDES_PROCESSES += ("trainer.distributed_optimizer",)
_OF_PROCESSES = ("trainer.num_processes", *DIVIDES_PROCESSES)


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


def why_no_kind_here(table: str, kind: str) -> str:
    """Why this machine has not what a kind of a table needs; empty where it has, as far as that shows before a run."""
    if (table, kind) != ("trainer", "megatron"):
        return ""
    try:
        check_megatron(choose_device("auto"))
    except UserError as error:
        return str(error)
    return ""


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
