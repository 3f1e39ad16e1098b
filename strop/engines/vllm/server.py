"""One vLLM server over HTTP: what it is asked, how long that may take, and what its refusals mean."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2

from strop.engines.remote_logprobs import message_in
from strop.types import EngineError, ModelError, UserError, WaitError

_HEALTH_S = 30.0  # in which a server that is well says so, however busy it is
FOREIGN = "it holds weights that this run did not give it"
BETWEEN_LOOKS_S = 0.2  # while a server starts
_REFUSED = "Worker failed with error '"  # before what a worker says, in what vLLM says
HOW_TO_START = "docs/en/laptop-to-cluster.md has the command of a server that strop can use."


class LostError(Exception):
    """The server is gone, or is not the one that it was. What it was asked for can be asked again once it is back."""


class Server:
    """A server at an address.

    Args:
        client: of the event loop that asks.
        address: http://host:port.
        timeout_s: of one answer; `engine.request_timeout_s`.
    """

    def __init__(self, client: httpx2.AsyncClient, address: str, *, timeout_s: float) -> None:
        self.address, self.timeout_s, self._client = address.rstrip("/"), timeout_s, client
        self.max_positions = 0
        self.in_flight = 0  # samples
        self.generation = 0  # how often it was lost and came back
        self.losses_in_a_row = 0
        self.label = self.checksum = ""  # of the weights that it took last
        self.changing = asyncio.Lock()  # held by whoever gives it weights or brings it back

    def __repr__(self) -> str:
        return f"vLLM server {self.address}"

    async def ask(self, method: str, path: str, body: Any = None, **params: str) -> Any:
        """The answer to one request.

        Raises:
            LostError: the connection failed, or the server says that its engine is dead.
            WaitError: no answer in time.
            EngineError: the server refuses.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await self._client.request(method, self.address + path, json=body, params=params)
        except TimeoutError:
            raise WaitError(
                f"engine.request_timeout_s = {self.timeout_s:g} s went by in which {self!r} did not answer {path}."
            ) from None
        except httpx2.TransportError as error:
            raise LostError(f"{path}: {type(error).__name__}: {error}") from error
        if answer.status_code == 200:
            return answer.json() if answer.content else None
        said = message_in(answer.text) or answer.reason_phrase
        if answer.status_code >= 500 and not await self.is_healthy():
            raise LostError(f"{path}: {said}")
        if answer.status_code == 403 or (answer.status_code == 404 and not said.startswith("The model")):
            raise UserError(f"{self!r} does not offer {path}, which strop needs: {said} {HOW_TO_START}")
        raise EngineError(f"{self!r} refuses {path} ({answer.status_code}): {said}")

    async def is_healthy(self) -> bool:
        """False where nobody answers, or an engine that has died."""
        try:
            answer = await self._client.get(self.address + "/health", timeout=_HEALTH_S)
        except httpx2.TransportError:
            return False
        return answer.status_code == 200

    async def until_up(self, timeout_s: float, *, still_runs: Any = None) -> None:
        """Wait until it answers. `still_runs` raises once it never will.

        Raises:
            WaitError: not in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.is_healthy():
                    if still_runs is not None:
                        still_runs()
                    await asyncio.sleep(BETWEEN_LOOKS_S)
        except TimeoutError:
            raise WaitError(
                f"engine.start_timeout_s = {timeout_s:g} s went by in which {self!r} did not answer /health. Is there a "
                f"server, and can this machine reach it? {HOW_TO_START}"
            ) from None

    async def greet(self, init_info: dict[str, Any] | None) -> None:
        """Learn what it serves, and tell it how weights will come (None: later). One that an earlier run left paused goes on.

        Raises:
            UserError: it lacks something that strop needs.
        """
        try:
            models = await self.ask("GET", "/v1/models")
            self.max_positions = int(models["data"][0].get("max_model_len") or 0)
            await self.ask("GET", "/weight_info")
        except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
            raise UserError(f"{self!r} must be a vLLM server; its answer is not in that protocol ({error}).") from error
        if init_info is not None:
            await self.init_transfer(init_info)
        await self.ask("POST", "/resume")
        self.label = self.checksum = ""

    async def init_transfer(self, init_info: dict[str, Any]) -> None:
        """Tell it how weights will come.

        Raises:
            UserError: it was not started for that.
        """
        try:
            await self.ask("POST", "/init_weight_transfer_engine", {"init_info": init_info})
        except EngineError as error:
            raise UserError(
                f"{self!r} must take weights the way that engine.transfer says: {said_by_worker(error)} {HOW_TO_START}"
            ) from error

    async def take(self, update_info: dict[str, Any], label: str) -> None:
        """Have it take weights, under a label that it then reports with every token.

        Raises:
            ModelError: names or shapes are not those of its model.
            EngineError: it took them and says another label.
        """
        await self.start_update()
        await self.ask_worker("/update_weights", {"update_info": update_info})
        await self.ask("POST", "/finish_weight_update", {"weight_version": label})
        await self.check_label(label)

    async def check_label(self, label: str) -> None:
        """Raises EngineError unless it says that it holds these weights, which it was just given."""
        found = await self._label_now()
        if found != label:
            raise EngineError(f"{self!r} must hold weights {label} after its update, and says {found}.")
        self.label = label

    async def check_same(self) -> None:
        """Raises LostError where it no longer holds what it was given: it was started again behind strop's back."""
        if self.label and await self._label_now() != self.label:
            raise LostError(FOREIGN)

    async def _label_now(self) -> str:
        return str((await self.ask("GET", "/weight_info"))["weight_version"])

    async def start_update(self) -> None:
        """An update that an earlier run left half made is ended first: this one gives all weights."""
        try:
            await self.ask("POST", "/start_weight_update")
        except EngineError as error:
            if "already active" not in str(error):
                raise
            await self.ask("POST", "/finish_weight_update")
            await self.ask("POST", "/start_weight_update")

    async def ask_worker(self, path: str, body: Any) -> None:
        """Have the workers do something with weights; what one refuses is a ModelError."""
        try:
            await self.ask("POST", path, body)
        except EngineError as error:
            raise ModelError(f"weights do not fit the model of {self!r}: {said_by_worker(error)}") from error


def said_by_worker(error: Exception) -> str:
    """What a worker says of its refusal, out of what vLLM makes of it.

    >>> said_by_worker(ValueError("Call failed: Worker failed with error 'missing ['a'].', please check the stack trace"))
    "missing ['a']."
    """
    _, found, rest = str(error).partition(_REFUSED)
    return rest.rpartition("', please check")[0] or rest if found else str(error)
