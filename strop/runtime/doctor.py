"""What this machine can run."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from strop import __version__
from strop.config import SGLangEngineOptions, VLLMEngineOptions
from strop.rewards.jail import Jail, describe
from strop.runtime.models import choose_device
from strop.runtime.ranks import check_several
from strop.trainers.megatron import check_megatron
from strop.types import ConfigError, RewardError, UserError

_PACKAGES = ("torch", "transformers", "safetensors", "pydantic", "math-verify", "pyarrow", "reasoning-gym", "peft")


def examine() -> Iterator[str]:
    """Lines of a report: versions, devices, engines and trainers."""
    import torch

    yield f"strop {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    for package in _PACKAGES:
        try:
            yield f"  {package:<14} {version(package)}"
        except PackageNotFoundError:
            yield f"  {package:<14} not installed"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield f"devices: cpu ({cores} cores, {torch.backends.cpu.get_cpu_capability()})"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield f"  cuda:{index} {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    yield "engines:"
    yield "  torch            yes: in this process"
    yield f"  vllm             yes: {_about_servers(VLLMEngineOptions().python, 'make vllm-env')}"
    yield f"  vllm_in_process  {_about_vllm_here()}"
    yield f"  sglang           yes: {_about_servers(SGLangEngineOptions().python, 'pip install sglang into .venv-sglang')}"
    yield "trainers:"
    yield f"  torch            yes: {_about_processes()}"
    yield f"  megatron         {_about_megatron()}"
    yield f"reward.kind = code: {_about_programs()}"
    if find_spec("reasoning_gym") is None:
        yield "data.kind = reasoning_gym: no; pip install 'strop[tasks]'"


def _about_servers(python: str, install: str) -> str:
    """Which servers a run from this folder can have."""
    there = "in servers that are there already (engine.addresses)"
    if Path(python).exists():
        return f"{there}, or that strop starts with {python}"
    return f"{there}; for those that strop starts {install}, or name engine.python"


def _about_vllm_here() -> str:
    """Whether this environment has vLLM."""
    if find_spec("vllm") is None:
        return "no: vLLM cannot be imported here; make vllm-env makes an environment with both, .venv-vllm/bin/strop"
    return "yes: in this process"


def _about_processes() -> str:
    try:
        check_several(2)
    except ConfigError as error:
        return f"in one process; {error}"
    return "in one process, or in several (trainer.num_processes)"


def _about_megatron() -> str:
    try:
        check_megatron(choose_device("auto"))
    except UserError as error:
        return f"no: {error}"
    return "yes: a GPU for each of trainer.num_processes"


def _about_programs() -> str:
    """What strop keeps the programs of a model from on this machine."""
    try:
        jail = Jail()
    except RewardError as error:
        return f"no; {error}"
    jail.close()
    return f"yes; {describe(jail.kept)}"
