"""The engine `vllm`: samples in one or several vLLM servers, which are given the trainer's weights."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx2

from strop.config import VLLMEngineOptions
from strop.engines.fit import check_weights
from strop.engines.remote_logprobs import read_prompt_logprobs
from strop.engines.vllm.nccl import NCCLTransfer
from strop.engines.vllm.process import Served, ServerProcess, server_command
from strop.engines.vllm.samples import GENERATE, ForeignWeightsError, read_sample, sample_body
from strop.engines.vllm.server import HOW_TO_START, LostError, Server
from strop.engines.vllm.transfer import FilesTransfer, WeightTransfer
from strop.types import (
    Completion,
    EngineError,
    GenerateRequest,
    Metric,
    StepMetrics,
    UserError,
    WeightSource,
)


class VLLMEngine:
    """Samples in vLLM servers.

    Nothing is started or asked before the first sample or the first weights. The servers then are given the weights that the
    engine was made with, whatever they began with, and a server that is lost is given the newest ones when it is back. The
    samples of a prompt go to the server with the fewest in flight, each as a request of its own with its own seed. Every token
    comes with the label of the weights that sampled it: a server that was restarted behind strop's back is found out by it.

    Args:
        options: `[engine]`.
        served: the model that servers begin with.
        weights: what is sampled from until others come; looked at when the first sample is asked for.
        stop_token_ids: ids that end a response (they stay its last token).
        tell: told of servers that are lost and come back.
    """

    def __init__(
        self,
        options: VLLMEngineOptions,
        served: Served,
        weights: WeightSource,
        *,
        stop_token_ids: Iterable[int],
        tell: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.options, self.stop_token_ids, self.policy_version = options, frozenset(stop_token_ids), 0
        self._served, self._weights, self._tell = served, weights, tell
        self._own = {name: tuple(tensor.shape) for name, tensor in weights}
        self._transfer = _transfer_of(options)
        self._token = secrets.token_hex(4)  # in labels, so that no two runs have the same
        self._versions: dict[str, int] = {}  # label to policy version
        self._label = ""  # of the weights that all servers hold
        self._folder: Path | None = None  # of the servers' logs
        self._processes: list[ServerProcess] = []
        self._servers: list[Server] = []
        self._client: httpx2.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_restarts, self._num_aborting_updates, self._knows_temperature = 0, 0, False
        self._first: StepMetrics = {}  # of the weights that were given before the first sample

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """One completion per seed, in the order of the seeds.

        Raises:
            UserError: a server is not there, or lacks something, or the request is too long for it.
            WaitError: no answer in time.
            EngineError: a server was lost too often.
        """
        if not request.seeds:
            return []
        await self._ready()
        self._check(request)
        if request.sampling.temperature not in (0, 1) and not self._knows_temperature:
            await self._check_temperature()
        server = min(self._servers, key=lambda one: one.in_flight)
        server.in_flight += len(request.seeds)
        tasks = [asyncio.ensure_future(self._sample(server, request, seed)) for seed in request.seeds]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            server.in_flight -= len(request.seeds)
            for task in tasks:
                task.cancel()

    async def _sample(self, server: Server, request: GenerateRequest, seed: int) -> Completion:
        """One sample, asked for again where the server was lost on the way."""
        while True:
            await self._may_sample.wait()
            generation, aborting = server.generation, self._num_aborting_updates
            body = sample_body(request, seed, self.stop_token_ids, self._label)
            try:
                answer = await server.ask("POST", GENERATE, body)
                found = read_sample(answer, request, self.stop_token_ids, self._versions)
            except LostError as error:
                reason = str(error)
            except ForeignWeightsError:
                reason = "it holds weights that this run did not give it"
            else:
                if found.finish_reason != "abort" or aborting != self._num_aborting_updates:
                    server.losses_in_a_row = 0
                    return found
                reason = "it ended a sample by itself"
            await self._bring_back(server, generation, reason)

    async def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of each token after those before it, at temperature 1; 0.0 for the first."""
        await self._ready()
        asked = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.0, "detokenize": False}
        body = {"token_ids": list(tokens), "sampling_params": asked, "cache_salt": self._label}
        answer = await self._servers[0].ask("POST", GENERATE, body)
        return read_prompt_logprobs(answer["prompt_logprobs"], tokens)

    async def update_weights(self, weights: WeightSource, policy_version: int) -> StepMetrics:
        """Give all servers these weights. Samples in flight meanwhile fare as `engine.pause_mode` says.

        Returns:
            What was moved, and how long sampling stood still.

        Raises:
            ModelError: they are not those of the model; the servers keep what they have.
        """
        await self._open()
        given = {name: tuple(tensor.shape) for name, tensor in weights}
        check_weights(given, self._own, of="the engine's model")
        began, label = time.monotonic(), f"{self._token}:{policy_version}:{len(self._versions)}"
        await self._transfer.prepare(weights, label)
        self._versions[label] = policy_version
        self._may_sample.clear()  # a server remembers prompts by label: none may be read under the wrong one
        self._num_aborting_updates += self.options.pause_mode == "abort"
        try:
            generations = [server.generation for server in self._servers]
            moved = await asyncio.gather(*map(self._give, self._servers, generations))
            self._label, self.policy_version = label, policy_version
        finally:
            self._may_sample.set()
        restarts, self._num_restarts = self._num_restarts, 0
        found = {
            "weights_bytes": Metric("sum", sum(moved)),
            "seconds/weights": Metric("sum", time.monotonic() - began),
            "engine_restarts": Metric("sum", restarts),
        }
        first, self._first = self._first, {}
        return {name: metric + first[name] if name in first else metric for name, metric in found.items()}

    async def close(self) -> None:
        """End what is in flight, the servers that were started, and what was written for them."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()
        processes, self._processes, self._servers = self._processes, [], []
        await asyncio.gather(*(asyncio.to_thread(process.stop) for process in processes))
        self._transfer.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        self._label = ""

    async def _ready(self) -> None:
        """Servers are there and hold weights of this run."""
        await self._open()
        if not self._label:
            async with self._opening:
                if not self._label:
                    self._first = await self.update_weights(self._weights, self.policy_version)

    async def _open(self) -> None:
        """Servers are there: started, or found at their addresses."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # a client belongs to the loop that it was made in
            self._loop, self._client, self._servers = loop, None, []
            self._opening, self._starting, self._may_sample = asyncio.Lock(), asyncio.Lock(), asyncio.Event()
            self._may_sample.set()
            self._label = ""
        async with self._starting:
            if self._servers:
                return
            self._client = httpx2.AsyncClient(
                timeout=None, limits=httpx2.Limits(max_connections=None, keepalive_expiry=4.0), trust_env=False
            )
            if not self.options.addresses and not self._processes:
                self._processes = self._new_processes()
            addresses = self.options.addresses or [process.address for process in self._processes]
            servers = [Server(self._client, address, timeout_s=self.options.request_timeout_s) for address in addresses]
            await asyncio.gather(*(self._until_up(server, process) for server, process in self._pairs(servers)))
            self._servers = servers

    def _new_processes(self) -> list[ServerProcess]:
        self._folder = Path(tempfile.mkdtemp(prefix="strop-vllm-"))
        args = [*server_command(self._served, backend=self._transfer.backend), *self.options.server_args]
        found = []
        for place in range(self.options.num_servers):
            found.append(ServerProcess(self.options.python, args, self._folder / f"server-{place}.log"))
            found[-1].start()
            self._processes = found  # so that they end whatever becomes of the next one
        return found

    def _pairs(self, servers: Sequence[Server]) -> list[tuple[Server, ServerProcess | None]]:
        """Each server with the process that it is, if strop started it."""
        return [(server, self._processes[place] if self._processes else None) for place, server in enumerate(servers)]

    async def _until_up(self, server: Server, process: ServerProcess | None) -> None:
        still_runs = None if process is None else process.check
        await server.until_up(self.options.start_timeout_s, still_runs=still_runs)
        await server.greet(self._transfer.init_info)

    async def _give(self, server: Server, generation: int) -> int:
        """Pause a server, give it the newest weights, and let it go on."""
        try:
            await server.ask("POST", "/pause", mode=self.options.pause_mode)
            try:
                return await self._transfer.deliver(server)
            finally:
                await server.ask("POST", "/resume")
        except LostError as error:
            return await self._bring_back(server, generation, str(error))

    async def _bring_back(self, server: Server, generation: int, reason: str) -> int:
        """Make a lost server one that holds the newest weights; whoever comes second waits for the first. Returns the bytes
        that it was given.

        Raises:
            EngineError: it was lost too often.
            WaitError: it did not come back in time.
        """
        async with server.coming_back:
            if server.generation != generation:
                return 0
            process = dict(self._pairs(self._servers)).get(server)
            server.losses_in_a_row += 1
            if server.losses_in_a_row > self.options.max_restarts:
                lines = f" Its last lines:\n{process.last_lines()}" if process is not None else ""
                raise EngineError(
                    f"{server!r} was lost {server.losses_in_a_row} times in a row (engine.max_restarts = "
                    f"{self.options.max_restarts}): {reason}.{lines}"
                )
            verb = "waited for" if process is None else "started again"
            self._tell(
                f"{server!r} is lost ({reason}); it is {verb} and given the weights of version {self.policy_version}."
            )
            num_bytes = await self._revive(server, process)
            server.generation += 1
            self._num_restarts += 1
            return num_bytes

    async def _revive(self, server: Server, process: ServerProcess | None) -> int:
        """A server that is lost again meanwhile is left to whoever asks it next."""
        try:
            if process is not None:
                await asyncio.to_thread(process.start)
            await self._until_up(server, process)
            num_bytes = await self._transfer.deliver(server)
            await server.ask("POST", "/resume")
        except LostError:
            return 0
        return num_bytes

    def _check(self, request: GenerateRequest) -> None:
        if not request.prompt_tokens:
            raise UserError("a prompt must have at least one token.")
        limits = [server.max_positions for server in self._servers if server.max_positions]
        if limits and request.num_positions > min(limits):
            raise UserError(
                f"prompt and response must fit the vLLM server's {min(limits)} positions, got {len(request.prompt_tokens)} "
                f"prompt tokens + {request.sampling.max_response_tokens} response tokens. Lower the response limit, shorten "
                "prompts, or start the server with a larger --max-model-len."
            )

    async def _check_temperature(self) -> None:
        """The likeliest token's log-probability must depend on the temperature, or the trainer would compare with another
        distribution than the one that was sampled from."""
        for server in self._servers:
            found = [await _likeliest(server, temperature) for temperature in (1.0, 2.0)]
            if found[0] == found[1]:
                raise UserError(
                    f"{server!r} must give log-probabilities at the sampling temperature, and gives those at temperature 1: "
                    f"start it with --logprobs-mode processed_logprobs. {HOW_TO_START}"
                )
        self._knows_temperature = True


async def _likeliest(server: Server, temperature: float) -> float:
    sampling = {"temperature": temperature, "top_p": 1.0, "top_k": 0, "seed": 0, "max_tokens": 1, "logprobs": 1}
    answer: Any = await server.ask("POST", GENERATE, {"token_ids": [0], "sampling_params": sampling})
    return max(entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"])


def _transfer_of(options: VLLMEngineOptions) -> WeightTransfer:
    if options.transfer == "nccl":
        return NCCLTransfer()
    return FilesTransfer(options.transfer_folder, changes_only=options.transfer_changes_only)
