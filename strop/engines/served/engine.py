"""What engines do whose samples come from servers: whatever the servers are, they are the same."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

from strop.engines.fit import check_request, check_weights, to_read_twice
from strop.engines.served.fleet import Fleet, StartServer, together
from strop.engines.served.process import Served
from strop.engines.served.server import FOREIGN, HOW_TO_START, ForeignWeightsError, LostError, Server
from strop.types import (
    Completion,
    GenerateRequest,
    Metric,
    StepMetrics,
    UserError,
    WeightSource,
)

T = TypeVar("T")
_SAME = 1e-3  # nats: rounding is less, another temperature is more


class ServedEngine(ABC):
    """Samples in servers.

    Nothing is started or asked before the first sample or the first weights. The servers then are given the weights that the
    engine was made with, whatever they began with, and a server that is lost is given the newest ones when it is back. The
    samples of a prompt go to the server with the fewest in flight, each as a request of its own with its own seed. Every token
    comes with the label of the weights that sampled it: a server that was restarted behind strop's back is found out by it.

    Args:
        options: `[engine]`.
        served: the model that servers begin with.
        weights: what is sampled from until others come; looked at when the first sample is asked for.
        stop_token_ids: ids that end a response (they stay its last token).
        tell: told of servers that start, are lost and come back.
        server: makes what starts a server (see `Fleet`); None: on this machine.
    """

    process: ClassVar[StartServer]  # makes what starts a server on this machine

    def __init__(
        self,
        options: Any,
        served: Served,
        weights: WeightSource,
        *,
        stop_token_ids: Iterable[int],
        tell: Callable[[str], None] = lambda words: None,
        server: StartServer | None = None,
    ) -> None:
        self.options, self.stop_token_ids, self.policy_version = options, frozenset(stop_token_ids), 0
        self._weights = to_read_twice(weights)
        self._own = {name: tuple(tensor.shape) for name, tensor in self._weights}
        self._fleet = self._make_fleet(options, served, tell=tell, start=server or self.process)
        self._token = secrets.token_hex(4)  # in labels, so that no two runs have the same
        self._versions: dict[str, int] = {}  # label to policy version
        self._label = ""  # of the weights that all servers hold
        self._num_aborting_updates, self._knows_temperature = 0, False
        self._first: StepMetrics = {}  # of the weights that were given before the first sample

    @abstractmethod
    def _make_fleet(self, options: Any, served: Served, *, tell: Callable[[str], None], start: StartServer) -> Fleet:
        """The servers, none of them started or asked yet."""

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
            await self._check_temperature(request.prompt_tokens)
        server = self._fleet.for_samples()
        server.in_flight += len(request.seeds)
        try:
            return await together(self._sample(server, request, seed) for seed in request.seeds)
        finally:
            server.in_flight -= len(request.seeds)

    async def _sample(self, server: Server, request: GenerateRequest, seed: int) -> Completion:
        """One sample, asked for again where the server was lost on the way."""
        while True:
            await self._may_sample.wait()
            generation, aborting = server.generation, self._num_aborting_updates
            try:
                found = await server.sample(request, seed, self.stop_token_ids, self._label, self._versions)
            except LostError as error:
                reason = str(error)
            except ForeignWeightsError:
                reason = FOREIGN
            else:
                if found.finish_reason != "abort" or aborting != self._num_aborting_updates:
                    self._fleet.has_sampled(server)
                    return found
                reason = "it ended a sample by itself"
            await self._fleet.bring_back(server, generation, reason)

    async def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of each token after those before it, at temperature 1; 0.0 for the first."""
        await self._ready()
        server = self._fleet.servers[0]
        return await self._asked(server, lambda: server.score(tokens, self._label))

    async def _asked(self, server: Server, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer to one request, sent again where the server was lost on the way."""
        while True:
            generation = server.generation
            try:
                return await ask()
            except LostError as error:
                await self._fleet.bring_back(server, generation, str(error))

    async def update_weights(self, weights: WeightSource, policy_version: int) -> StepMetrics:
        """Give all servers these weights. Samples in flight meanwhile fare as `engine.pause_mode` says.

        Returns:
            What was moved, and how long that took.

        Raises:
            ModelError: they are not those of the model; the servers keep what they have.
        """
        await self._open()
        await self._fleet.wake()
        weights = to_read_twice(weights)
        given = {name: tuple(tensor.shape) for name, tensor in weights}
        check_weights(given, self._own, of="the engine's model")
        began, label = time.monotonic(), f"{self._token}:{policy_version}:{len(self._versions)}"

        def stop_sampling() -> None:
            """A server remembers prompts by label: none may be read under the wrong one."""
            self._versions[label] = policy_version
            self._may_sample.clear()
            self._num_aborting_updates += self.options.pause_mode == "abort"

        try:
            num_bytes = await self._fleet.give(weights, label, before=stop_sampling)
            self._label, self.policy_version = label, policy_version
        finally:
            self._may_sample.set()
        found = {
            "weights_bytes": Metric("sum", num_bytes),
            "seconds/weights": Metric("sum", time.monotonic() - began),
            "engine_restarts": Metric("sum", self._fleet.num_restarts),
        }
        self._fleet.num_restarts = 0
        first, self._first = self._first, {}
        return {name: metric + first[name] if name in first else metric for name, metric in found.items()}

    async def rest(self) -> None:
        """With `engine.sleep` servers give up the memory of a GPU until weights come or a sample is asked for."""
        if self.options.sleep and self._label:
            await self._fleet.rest()

    async def close(self) -> None:
        """End what is in flight, the servers that were started, and what was written for them."""
        await self._fleet.close()
        self._label = ""

    async def _ready(self) -> None:
        """Servers are there, awake, and hold weights of this run."""
        await self._open()
        await self._fleet.wake()
        if not self._label:
            async with self._giving_first:
                if not self._label:
                    self._first = await self.update_weights(self._weights, self.policy_version)

    async def _open(self) -> None:
        if await self._fleet.open():
            self._giving_first, self._may_sample, self._label = asyncio.Lock(), asyncio.Event(), ""
            self._may_sample.set()

    def _check(self, request: GenerateRequest) -> None:
        server, limits = self._fleet.servers[0], [s.max_positions for s in self._fleet.servers if s.max_positions]
        larger = f"start the server with a larger {server.length_flag}"
        check_request(request, min(limits, default=None), of=f"the {server.name} server's", or_else=larger)

    async def _check_temperature(self, prompt: Sequence[int]) -> None:
        """Log-probabilities must depend on the temperature, or the trainer would compare with another distribution than the
        one that was sampled from."""
        for server in self._fleet.servers:
            one, other = [await self._likely(server, prompt, temperature) for temperature in (1.0, 2.0)]
            if max(abs(a - b) for a, b in zip(one, other, strict=True)) < _SAME:
                raise UserError(
                    f"{server!r} must give log-probabilities at the sampling temperature, and gives those at temperature 1: "
                    f"{server.at_temperature}. {HOW_TO_START}"
                )
        self._knows_temperature = True

    async def _likely(self, server: Server, prompt: Sequence[int], temperature: float) -> list[float]:
        return await self._asked(server, lambda: server.likely(prompt, temperature))
