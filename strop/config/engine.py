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


class ServedEngineOptions(Options):
    """Of every engine whose samples come from servers."""

    why_not: ClassVar[dict[str, str]] = {
        "num_replicas": "has none: engine.num_servers says how many servers sample",
    }
    gpu_flags: ClassVar[tuple[tuple[str, ...], ...]] = ()  # arguments of a server that multiply the GPUs that it takes
    without: ClassVar[str] = "engine.addresses"  # where strop starts the servers

    kind: Any  # a word of its own in each kind, as the two below
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
    python: str
    server_args: tuple[str, ...] = ()
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
    pause_mode: Any
    sleep: bool = Field(
        default=False,
        description="While the trainer works the servers keep their weights in host memory and give up that of their GPUs, so "
        "that both can have the same ones; on a cluster they are then placed with the ranks.",
    )
    transfer: Any
    transfer_folder: str | None = Field(
        default=None,
        description="Folder for the files of weights; below /dev/shm it is shared memory. none: a temporary folder.",
    )

    @property
    def starts_servers(self) -> bool:
        """Whether strop starts them."""
        return not self.addresses

    @property
    def gpus_per_server(self) -> int:
        """GPUs that server_args ask for, for one server."""
        words = [word for arg in self.server_args for word in arg.split("=", 1)]
        found = 1
        for names in self.gpu_flags:
            given = [words[at + 1] for at, word in enumerate(words[:-1]) if word in names]
            found *= int(given[-1]) if given and given[-1].isdigit() else 1
        return found

    def problems(self) -> Iterator[Problem]:
        for address in self.addresses:
            yield from _address_problems("addresses", address)
        if len(set(self.addresses)) < len(self.addresses):
            yield Problem("addresses", f"must be different servers, got {list(self.addresses)}.")
        if not self.python.strip():
            yield Problem("python", f"must be a Python executable, got {self.python!r}.")

    def idle(self) -> Iterator[Idle]:
        if not self.starts_servers:
            for name in ("num_servers", "python", "server_args"):
                yield Idle(name, f"is only used for servers that strop starts (without {self.without})")
        if self.transfer != "files":
            yield Idle("transfer_folder", "is only used with engine.transfer = files")


def _address_problems(name: str, address: str) -> Iterator[Problem]:
    if not (is_address(address) and is_host_and_port(address)):
        yield Problem(
            name, f"must be of the form http://host:port, with a port up to 65535 and no path, got {address!r}."
        )


class VLLMEngineOptions(ServedEngineOptions):
    """Samples in vLLM servers, which are given new weights after each step. Without addresses strop starts them itself."""

    why_not: ClassVar[dict[str, str]] = {
        **ServedEngineOptions.why_not,
        "max_sequences": _OF_SERVERS,
        "max_cache_tokens": _CACHE_OF_SERVERS,
        "router": "has none: strop spreads prompts over its vLLM servers by itself",
        "deterministic": "has none: a vLLM server draws each sample from its own seed",
    }
    gpu_flags: ClassVar[tuple[tuple[str, ...], ...]] = (("--tensor-parallel-size", "-tp"),)

    kind: Literal["vllm"] = "vllm"
    python: str = Field(
        default=".venv-vllm/bin/python",
        description="Python executable of the environment that has vLLM, for the servers that strop starts (make vllm-env).",
    )
    server_args: tuple[str, ...] = Field(
        default=(),
        description='More arguments for the servers that strop starts, as vllm serve takes them: ["--max-model-len", "4096"].',
    )
    pause_mode: Literal["keep", "wait", "abort"] = Field(
        default="keep",
        description="What becomes of samples in flight when new weights come: they go on with them, they end first, or they "
        "end where they are (finish reason abort).",
    )
    transfer: Literal["files", "nccl", "ipc"] = Field(
        default="files",
        description="How weights reach the servers: as safetensors files that both sides can read, from GPU to GPU (nccl), or "
        "within one GPU (ipc). The last two need vLLM in strop's own environment, too.",
    )
    transfer_changes_only: bool = Field(
        default=False,
        description="Write only what changed, for a slow disk or network. Both sides then hold a copy of all weights.",
    )

    def idle(self) -> Iterator[Idle]:
        yield from super().idle()
        if self.transfer != "files":
            yield Idle("transfer_changes_only", "is only used with engine.transfer = files")


class VLLMInProcessOptions(Options):
    """Samples with vLLM in this process, which copies the trainer's weights after each step; for a run on one device."""

    why_not: ClassVar[dict[str, str]] = {
        "max_sequences": "has none: vLLM decides how many sequences it samples at once; engine_args takes --max-num-seqs",
        "max_cache_tokens": "has none: vLLM sizes its own cache; engine_args takes --gpu-memory-utilization",
        "server_args": "has none: there is no server; what it would take stands in engine_args",
        "pause_mode": "has none: samples in flight go on with new weights",
        **dict.fromkeys(
            ("num_replicas", "num_servers"), "has none: one vLLM runs in this process; servers may be several"
        ),
        **dict.fromkeys(
            ("transfer", "transfer_folder", "transfer_changes_only"), "has none: weights are copied within this process"
        ),
        **dict.fromkeys(
            ("addresses", "router", "python", "start_timeout_s", "request_timeout_s", "max_restarts"),
            "has none: there is no server",
        ),
        "deterministic": "has none: vLLM draws each sample from its own seed",
    }

    kind: Literal["vllm_in_process"] = "vllm_in_process"
    engine_args: tuple[str, ...] = Field(
        default=(),
        description='More arguments for vLLM, as vllm serve takes them: ["--max-model-len", "4096"].',
    )
    sleep: bool = Field(
        default=False,
        description="While the trainer works vLLM keeps its weights in host memory and gives up that of the GPU, which both "
        "share. vLLM refuses it on a CPU.",
    )


class SGLangEngineOptions(ServedEngineOptions):
    """Samples in SGLang servers, which are given new weights after each step. Those that are not there strop starts itself."""

    why_not: ClassVar[dict[str, str]] = {
        **ServedEngineOptions.why_not,
        "max_sequences": "has none: SGLang decides how many sequences it samples at once; engine.server_args takes "
        "--max-running-requests",
        "max_cache_tokens": "has none: SGLang sizes its own cache; engine.server_args takes --mem-fraction-static",
        "transfer_changes_only": "has none: SGLang reads whole files",
    }
    gpu_flags: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("--tensor-parallel-size", "--tp-size", "--tp"),
        ("--pipeline-parallel-size", "--pp-size"),
        ("--data-parallel-size", "--dp-size"),
    )
    without: ClassVar[str] = "engine.addresses and engine.router"

    kind: Literal["sglang"] = "sglang"
    router: str | None = Field(
        default=None,
        description="http://host:port of an SGLang router that is there already: samples go to it, and weights to each server "
        "that it names as its worker. none: strop spreads prompts over the servers itself.",
    )
    python: str = Field(
        default=".venv-sglang/bin/python",
        description="Python executable of the environment that has SGLang, for the servers that strop starts.",
    )
    server_args: tuple[str, ...] = Field(
        default=(),
        description="More arguments for the servers that strop starts, as SGLang's launch_server takes them: "
        '["--context-length", "4096"].',
    )
    deterministic: bool = Field(
        default=True,
        description="Servers draw each sample from its own seed, whatever else is in flight, and are slower for it; those that "
        "are there already must have been started with --enable-deterministic-inference. false, and without: SGLang draws from "
        "a stream of its own, and a run cannot be repeated.",
    )
    pause_mode: Literal["retract", "in_place", "abort"] = Field(
        default="retract",
        description="What becomes of samples in flight when new weights come: they go on with them, what came before read "
        "anew (retract) or as the old weights left it (in_place), or they end where they are (finish reason abort).",
    )
    transfer: Literal["files", "nccl"] = Field(
        default="files",
        description="How weights reach the servers: as safetensors files that both sides can read, or from GPU to GPU (nccl).",
    )

    @property
    def starts_servers(self) -> bool:
        return not self.addresses and self.router is None

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.router is not None:
            yield from _address_problems("router", self.router)
            if self.addresses:
                yield Problem(
                    "addresses", "must be [] with engine.router: the servers are those that the router names."
                )


EngineOptions = Annotated[
    TorchEngineOptions | VLLMEngineOptions | VLLMInProcessOptions | SGLangEngineOptions, Field(discriminator="kind")
]
