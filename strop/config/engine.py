"""Options of the engines: what samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from strop.config.addresses import is_address, is_host_and_port
from strop.config.base import Idle, Options, Problem

VLLM_HOTTEST = 2.0  # the largest temperature that vLLM's servers take
_OF_SERVERS = "has none: vLLM decides how many sequences it samples at once; engine.server_args takes --max-num-seqs"
_CACHE_OF_SERVERS = "has none: vLLM sizes its own cache; engine.server_args takes --gpu-memory-utilization"


class TorchEngineOptions(Options):
    """Samples in this process, from the trainer's own weights."""

    kind: Literal["torch"] = "torch"
    max_sequences: int = Field(
        default=64, ge=1, le=65536, description="Sequences sampled at the same time; the others wait for a free slot."
    )
    num_replicas: int = Field(
        default=0,
        ge=0,
        le=4096,
        description="Samplers with a copy of the model of their own, each an actor of the cluster that --cluster names, with "
        "max_sequences of its own; 0: rank 0 samples from its own weights.",
    )
    max_cache_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Positions of the key-value cache over all sequences, at most: as many are sampled at the same time as fit "
        "with the longest prompt and response. none: engine.max_sequences alone says how many.",
    )

    @property
    def of_each(self) -> dict[str, Any]:
        """Of one sampler, by the names that it takes them under."""
        return {name: value for name, value in self.bound().items() if name != "num_replicas"}


class VLLMEngineOptions(Options):
    """Samples in vLLM servers, which are given new weights after each step. Without addresses strop starts them itself."""

    why_not: ClassVar[dict[str, str]] = {
        "max_sequences": _OF_SERVERS,
        "max_cache_tokens": _CACHE_OF_SERVERS,
        "num_replicas": "has none: engine.num_servers says how many servers sample",
    }

    kind: Literal["vllm"] = "vllm"
    addresses: tuple[str, ...] = Field(
        default=(),
        description="http://host:port of each server that is there already; prompts are spread over them. []: strop starts "
        "servers itself.",
    )
    num_servers: int = Field(
        default=1,
        ge=1,
        le=64,
        description="How many servers strop starts: on this machine, or on the nodes of a cluster (--cluster).",
    )
    python: str = Field(
        default=".venv-vllm/bin/python",
        description="Python executable of the environment that has vLLM, for the servers that strop starts (make vllm-env).",
    )
    server_args: tuple[str, ...] = Field(
        default=(),
        description='More arguments for the servers that strop starts, as vllm serve takes them: ["--max-model-len", "4096"].',
    )
    start_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds in which a server must answer after its start, or come back after it was lost.",
    )
    request_timeout_s: float = Field(
        default=1800.0,
        gt=0,
        description="Seconds that an answer of a server may take: of sampling, and of taking weights.",
    )
    max_restarts: int = Field(
        default=3,
        ge=0,
        le=1000,
        description="How often in a row, without a sample in between, a lost server is started again or waited for; then the "
        "run stops.",
    )
    pause_mode: Literal["keep", "wait", "abort"] = Field(
        default="keep",
        description="What becomes of samples in flight when new weights come: they go on with them, they end first, or they "
        "end where they are (finish reason abort).",
    )
    sleep: bool = Field(
        default=False,
        description="While the trainer works the servers keep their weights in host memory and give up that of their GPUs, so "
        "that both can have the same ones; on a cluster they are then placed with the ranks.",
    )
    transfer: Literal["files", "nccl", "ipc"] = Field(
        default="files",
        description="How weights reach the servers: as safetensors files that both sides can read, from GPU to GPU (nccl), or "
        "within one GPU (ipc). The last two need vLLM in strop's own environment, too.",
    )
    transfer_folder: str | None = Field(
        default=None,
        description="Folder for the files of weights; below /dev/shm it is shared memory. none: a temporary folder.",
    )
    transfer_changes_only: bool = Field(
        default=False,
        description="Write only what changed, for a slow disk or network. Both sides then hold a copy of all weights.",
    )

    @property
    def gpus_per_server(self) -> int:
        """GPUs that server_args ask for, for one server."""
        words = [word for arg in self.server_args for word in arg.split("=", 1)]
        given = [words[at + 1] for at, word in enumerate(words[:-1]) if word in ("--tensor-parallel-size", "-tp")]
        return int(given[-1]) if given and given[-1].isdigit() else 1

    def problems(self) -> Iterator[Problem]:
        for address in self.addresses:
            if not (is_address(address) and is_host_and_port(address)):
                yield Problem(
                    "addresses",
                    f"must be of the form http://host:port, with a port up to 65535 and no path, got {address!r}.",
                )
        if len(set(self.addresses)) < len(self.addresses):
            yield Problem("addresses", f"must be different servers, got {list(self.addresses)}.")
        if not self.python.strip():
            yield Problem("python", f"must be a Python executable, got {self.python!r}.")

    def idle(self) -> Iterator[Idle]:
        if self.addresses:
            for name in ("num_servers", "python", "server_args"):
                yield Idle(name, "is only used for servers that strop starts (without engine.addresses)")
        if self.transfer != "files":
            for name in ("transfer_folder", "transfer_changes_only"):
                yield Idle(name, "is only used with engine.transfer = files")


EngineOptions = Annotated[TorchEngineOptions | VLLMEngineOptions, Field(discriminator="kind")]
