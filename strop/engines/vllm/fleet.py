"""The vLLM servers of an engine: started or found, given weights, and brought back when they are lost."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx2

from strop.config import VLLMEngineOptions
from strop.engines.vllm.process import EndedError, Served, ServerProcess, server_command
from strop.engines.vllm.server import LostError, Server
from strop.engines.vllm.transfer import WeightTransfer
from strop.types import EngineError, WeightSource

T = TypeVar("T")
StartServer = Callable[[str, Sequence[str], Path], Any]  # Python, arguments and log to a server that is not started yet
_KEEPALIVE_S = 4.0  # below the 5 s after which a server closes a connection that nobody uses


class Fleet:
    """Servers that hold the same weights.

    Args:
        options: `[engine]`.
        served: the model that servers begin with.
        transfer: how weights reach them.
        tell: told of what is started, lost and brought back.
        server: makes what starts a server: of this machine, or one that does what `ServerProcess` does elsewhere.
    """

    def __init__(
        self,
        options: VLLMEngineOptions,
        served: Served,
        transfer: WeightTransfer,
        *,
        tell: Callable[[str], None],
        server: StartServer = ServerProcess,
    ) -> None:
        self._server = server
        self.options, self.servers, self.num_restarts = options, list[Server](), 0
        self._served, self._transfer, self._tell = served, transfer, tell
        self._folder: Path | None = None  # of the servers' logs
        self._processes: dict[str, Any] = {}  # by address, those that were started here
        self._client: httpx2.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._label = ""  # of the weights that were prepared last
        self._asleep: set[Server] = set()

    async def open(self) -> bool:
        """See to it that servers are there, started or at their addresses. True where that is so only since now: in the first
        call, and in the first one of another event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # a client belongs to the loop that it was made in
            self._loop, self._client, self.servers, self._opening, self._asleep = loop, None, [], asyncio.Lock(), set()
        async with self._opening:
            if self.servers:
                return False
            limits = httpx2.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_S)
            self._client = httpx2.AsyncClient(timeout=None, limits=limits, trust_env=False)
            if not self.options.addresses and not self._processes:
                self._start_processes()
            timeout_s = self.options.request_timeout_s
            addresses = self.options.addresses or self._processes
            servers = [Server(self._client, address, timeout_s=timeout_s) for address in addresses]
            try:
                await together(map(self._until_up, servers))
            except LostError as error:
                raise EngineError(f"a vLLM server was lost before it was up: {error}") from error
            self.servers = servers
            return True

    def _start_processes(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="strop-vllm-"))
        args = [*server_command(self._served, backend=self._transfer.backend), *self.options.server_args]
        args += ["--enable-sleep-mode"] if self.options.sleep else []
        for place in range(self.options.num_servers):
            process = self._server(self.options.python, args, self._folder / f"server-{place}.log")
            self._processes[process.address] = (
                process  # before it starts, so that it ends whatever becomes of the next one
            )
            process.start()
            self._tell(f"vLLM server {process.address} starts; its log is {process.log}")

    async def _until_up(self, server: Server) -> None:
        process = self._processes.get(server.address)
        await server.until_up(self.options.start_timeout_s, still_runs=None if process is None else process.check)
        await server.greet(self._transfer.init_info)

    async def give(self, weights: WeightSource, label: str, *, before: Callable[[], None]) -> int:
        """Give all servers these weights, under this label. Returns the bytes that were moved.

        `before` is called once the weights are ready to be taken, before the first server is told of them. Nobody brings a
        server back meanwhile: it would be given one of two weights, and nobody could say which.
        """
        async with AsyncExitStack() as held:
            for server in self.servers:
                await held.enter_async_context(server.changing)
            await self._transfer.prepare(weights, label)
            self._label = label
            before()
            return sum(await together(map(self._give, self.servers)))

    async def _give(self, server: Server) -> int:
        try:
            return await self._deliver(server)
        except LostError as error:
            return await self._bring_back(server, str(error))

    async def _deliver(self, server: Server) -> int:
        """Pause a server, hand it the newest weights, and let it go on."""
        await server.check_same()
        await server.ask("POST", "/pause", mode=self.options.pause_mode)
        try:
            return await self._transfer.deliver(server)
        finally:
            await server.ask("POST", "/resume")

    async def bring_back(self, server: Server, generation: int, reason: str) -> None:
        """Make a lost server one that holds the newest weights; whoever comes second waits for the first.

        Args:
            generation: of the server that was lost.
            reason: what was seen of it.

        Raises:
            EngineError: it was lost too often.
            WaitError: it did not come back in time.
        """
        async with server.changing:
            if server.generation == generation:
                await self._bring_back(server, reason)

    async def _bring_back(self, server: Server, reason: str) -> int:
        process = self._processes.get(server.address)
        while True:
            if server.losses_in_a_row == self.options.max_restarts:  # it stays lost for whoever comes after
                lines = f" Its last lines:\n{process.last_lines()}" if process is not None else ""
                raise EngineError(
                    f"{server!r} was lost {self.options.max_restarts + 1} times in a row (engine.max_restarts = "
                    f"{self.options.max_restarts}): {reason.rstrip('.')}.{lines}"
                )
            server.losses_in_a_row += 1
            self._tell(f"{server!r} is lost ({reason}). It gets the weights {self._label} when it is back.")
            try:
                if process is not None and not await server.is_healthy():
                    await asyncio.to_thread(process.start)
                    self._processes[process.address] = self._processes.pop(server.address)
                    server.address = process.address  # another one where it had to move
                    self._tell(f"{server!r} starts again; its log is {process.log}")
                await self._until_up(server)
                server.generation += 1  # before it is given anything: a group of the one before is not this one's
                num_bytes = await self._deliver(server)
            except LostError as error:
                reason = str(error)
                continue
            except EndedError as error:  # killed again while it starts
                reason = error.what
                continue
            self.num_restarts += 1
            return num_bytes

    async def rest(self) -> None:
        """Have all servers keep their weights in host memory, and nothing on a GPU."""
        self._asleep = set(self.servers)
        await together(map(self._rest, self.servers))

    async def _rest(self, server: Server) -> None:
        with suppress(LostError):  # which is seen when it is woken
            await server.ask("POST", "/sleep", level="1")

    async def wake(self) -> None:
        """Have those that rest be as before; one that was lost meanwhile is brought back."""
        if self._asleep:
            async with self._opening:
                await together(map(self._wake, self._asleep))
                self._asleep = set()

    async def _wake(self, server: Server) -> None:
        generation = server.generation
        try:
            await server.ask("POST", "/wake_up")
        except LostError as error:
            await self.bring_back(server, generation, str(error))

    async def close(self) -> None:
        """End the servers that were started, and remove what was written for all of them."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()
        processes, self._processes, self.servers = self._processes, {}, []
        await together(asyncio.to_thread(process.stop) for process in processes.values())
        self._transfer.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of them return, in their order; the first error ends the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
