"""One server over HTTP: how it is asked, what its refusals mean, and what every kind of server can do."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import httpx2

from strop.engines.remote_logprobs import message_in
from strop.types import Completion, EngineError, FinishReason, GenerateRequest, GuardError, UserError, WaitError

_HEALTH_S = 30.0  # in which a server that is well says so, however busy it is
FOREIGN = "it holds weights that this run did not give it"
_BETWEEN_LOOKS_S = (0.02, 0.2)  # while a server starts: at first, doubled from look to look, and at most
HOW_TO_START = "docs/en/laptop-to-cluster.md has the command of a server that strop can use."
IMPOSSIBLE = -9999.0  # at or below it stands minus infinity, in the way that a server writes it


class LostError(Exception):
    """The server is gone, or is not the one that it was. What it was asked for can be asked again once it is back."""


class ForeignWeightsError(Exception):
    """Tokens were sampled by weights that this run did not give the server."""


class Server(ABC):
    """A server at an address.

    Args:
        client: of the event loop that asks.
        address: http://host:port.
        timeout_s: of one answer; `engine.request_timeout_s`.
        is_router: it stands before servers: what becomes of them it reports as its own.
    """

    name: ClassVar[str]  # whose server it is
    length_flag: ClassVar[str]  # of its start: how many positions it has
    at_temperature: ClassVar[str]  # what makes it give log-probabilities at the sampling temperature
    generate: ClassVar[str]  # path of a sample
    sample_body: ClassVar[Callable[..., dict[str, Any]]]  # request, seed, end ids and label to what is sent there
    read_sample: ClassVar[Callable[..., Completion]]  # answer, request, end ids and versions to the sample, checked

    def __init__(self, client: httpx2.AsyncClient, address: str, *, timeout_s: float, is_router: bool = False) -> None:
        self.address, self.timeout_s, self._client, self._is_router = address.rstrip("/"), timeout_s, client, is_router
        self.max_positions = 0
        self.in_flight = 0  # samples
        self.generation = 0  # how often it was lost and came back
        self.losses_in_a_row = 0
        self.label = self.checksum = ""  # of the weights that it took last
        self.changing = asyncio.Lock()  # held by whoever gives it weights or brings it back

    def __repr__(self) -> str:
        return f"{self.name} {'router' if self._is_router else 'server'} {self.address}"

    # ---- what every kind of server can do, in its own words ---------------------------------------------------------

    @abstractmethod
    async def greet(self) -> None:
        """Learn what it serves. One that an earlier run left paused goes on.

        Raises:
            UserError: it lacks something that strop needs.
        """

    @abstractmethod
    async def pause(self, mode: str) -> None:
        """Have it sample nothing more until `resume`; samples in flight fare as `engine.pause_mode` says."""

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def sleep(self) -> None:
        """Have it keep its weights in host memory, and nothing on a GPU."""

    @abstractmethod
    async def wake_up(self) -> None: ...

    @abstractmethod
    async def label_now(self) -> str:
        """The label of the weights that it says it holds."""

    @abstractmethod
    async def score(self, tokens: Sequence[int], label: str) -> list[float]:
        """Log-probability of each token after those before it, at temperature 1; 0.0 for the first."""

    @abstractmethod
    async def likely(self, prompt: Sequence[int], temperature: float) -> list[float]:
        """Log-probabilities of the 4 likeliest tokens after a prompt, as they would come with a sample. Not of the first
        alone: where a model is sure, it is 0 at any temperature."""

    async def sample(
        self, request: GenerateRequest, seed: int, stop_ids: Collection[int], label: str, versions: Mapping[str, int]
    ) -> Completion:
        """One sample with a random stream of its own, checked.

        Args:
            request: the prompt and how to sample.
            seed: of the sample.
            stop_ids: end ids beside those of the request; no others end it.
            label: keeps what the server remembers of prompts apart by the weights that read them.
            versions: label to policy version of the weights that the server was given.

        Raises:
            ForeignWeightsError: other weights sampled a token.
            GuardError: a log-probability is not finite.
            EngineError: the answer is not one to the request.
        """
        answer = await self.ask("POST", self.generate, self.sample_body(request, seed, stop_ids, label))
        return self.read_sample(answer, request, stop_ids, versions)

    # ---- how it is asked --------------------------------------------------------------------------------------------

    async def ask(self, method: str, path: str, body: Any = None, **params: str) -> Any:
        """The answer to one request; None where it has no content.

        Raises:
            LostError: the connection failed, or the server says that its engine is dead.
            WaitError: no answer in time.
            EngineError: the server refuses.
        """
        answer = await self.send(method, path, body, **params)
        return answer.json() if answer.content else None

    async def send(self, method: str, path: str, body: Any = None, **params: str) -> httpx2.Response:
        """The same, for an answer that is no JSON."""
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
            return answer
        said = message_in(answer.text) or answer.reason_phrase
        if answer.status_code >= 500 and (self._is_router or not await self.is_healthy()):
            raise LostError(f"{path}: {said}")
        if answer.status_code == 403 or (answer.status_code == 404 and not said.startswith("The model")):
            raise UserError(f"{self!r} does not offer {path}, which strop needs: {said} {HOW_TO_START}")
        raise EngineError(f"{self!r} refuses {path} ({answer.status_code}): {said}")

    async def is_healthy(self) -> bool:
        """False where nobody answers, or an engine that has died."""
        return await self.answers("/health")

    async def answers(self, path: str) -> bool:
        """True where it answers so, and that all is well. A server may close a connection with an error that it answered: one
        that breaks is opened anew, once."""
        for _ in range(2):
            try:
                answer = await self._client.get(self.address + path, timeout=_HEALTH_S)
            except (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError):
                continue
            except httpx2.TransportError:
                return False
            return answer.status_code == 200
        return False

    async def is_up(self) -> bool:
        """True where it can be greeted. Asked while nobody gives it weights."""
        return await self.is_healthy()

    async def until_up(
        self,
        timeout_s: float,
        *,
        still_runs: Callable[[], None] | None = None,
        is_up: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """Wait until it answers.

        Args:
            timeout_s: in which it must.
            still_runs: raises once it never will.
            is_up: what is asked; `is_up` of this server where None.

        Raises:
            WaitError: not in time.
        """
        try:
            pause_s, longest_s = _BETWEEN_LOOKS_S
            async with asyncio.timeout(timeout_s):
                while not await (is_up or self.is_up)():
                    if still_runs is not None:
                        still_runs()
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, longest_s)
        except TimeoutError:
            raise WaitError(
                f"engine.start_timeout_s = {timeout_s:g} s went by in which {self!r} did not answer /health. Is there a "
                f"server, and can this machine reach it? {HOW_TO_START}"
            ) from None

    async def check_label(self, label: str) -> None:
        """Raises EngineError unless it says that it holds these weights, which it was just given."""
        found = await self.label_now()
        if found != label:
            raise EngineError(f"{self!r} must hold weights {label} after its update, and says {found}.")
        self.label = label

    async def check_same(self) -> None:
        """Raises LostError where it no longer holds what it was given: it was started again behind strop's back."""
        if self.label and await self.label_now() != self.label:
            raise LostError(FOREIGN)


# ---- a sample as it is answered ---------------------------------------------------------------------------------------


def versions_of(spans: Sequence[Mapping[str, Any]], versions: Mapping[str, int]) -> tuple[int, ...]:
    """Policy version of each token, from the spans of tokens that weights of one label sampled.

    >>> versions_of([{"version": "a", "start": 0, "end": 2}, {"version": "b", "start": 2, "end": 3}], {"a": 4, "b": 5})
    (4, 4, 5)

    Raises:
        ForeignWeightsError: other weights sampled a token.
    """
    if any(span["version"] not in versions for span in spans):
        raise ForeignWeightsError
    return tuple(versions[span["version"]] for span in spans for _ in range(span["start"], span["end"]))


def check_finite(logprobs: Sequence[float]) -> None:
    """Raises GuardError for log-probabilities of sampled tokens that are minus infinity or NaN."""
    if any(not logprob > IMPOSSIBLE for logprob in logprobs):
        raise GuardError(
            "the engine's logits are not finite: the model is broken, or its last update broke it.", guard="non_finite"
        )


def end_of_sample(
    said: str, tokens: tuple[int, ...], request: GenerateRequest, stop_ids: Collection[int], *, name: str
) -> FinishReason:
    """Why a sample ended. An end id exactly at the limit is "stop".

    Args:
        said: by what sampled it.
        name: of what sampled it.

    Raises:
        EngineError: it should not have ended there.
    """
    if said == "abort":
        return "abort"
    if tokens and tokens[-1] in {*stop_ids, *request.sampling.stop_token_ids}:
        return "stop"
    if len(tokens) == request.sampling.max_response_tokens:
        return "length"
    raise EngineError(
        f"{name} ended a sample after {len(tokens)} of {request.sampling.max_response_tokens} tokens, without an end "
        f"token, and calls that {said!r}."
    )
