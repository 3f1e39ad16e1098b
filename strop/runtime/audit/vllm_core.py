"""What stands for a vLLM that runs in strop's own process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from strop.engines.served.process import Served
from strop.engines.vllm.core import Asked, Sampled
from strop.engines.vllm.in_process import VLLMInProcess
from strop.engines.vllm.remote.strop_weights import WrongWeights, check_fits, shapes_in
from strop.runtime.audit import stand_in
from strop.runtime.audit.stand_in import Token, spans_of
from strop.runtime.audit.teacher_server import MAX_MODEL_LEN
from strop.types import ModelError, WeightSource


@dataclass
class _Flying:
    """A sample on its way."""

    asked: Asked
    tokens: list[int]
    found: list[Token]


class CoreStandIn(stand_in.StandIn):
    """Does what `Core` does, with the numbers that the engine `torch` draws.

    Args:
        served: the folder of its model.
        args: kept, to be looked at.
        can_sleep: whether `sleep` may be called.
    """

    max_positions = MAX_MODEL_LEN
    did: ClassVar[Counter[str]] = Counter()  # what all of them were asked to do, but for sampling

    def __init__(self, served: Served, args: Sequence[str], *, can_sleep: bool) -> None:
        self._own, self._can_sleep = shapes_in(Path(served.path)), can_sleep
        super().__init__(Path(served.path))
        self.did[f"started with {list(args)}"] += 1

    @staticmethod
    def check() -> None:
        """It is always there."""

    def forget(self) -> None:
        self._flying = dict[str, _Flying]()

    def step(self, wanted: Sequence[Asked], unwanted: Sequence[str]) -> list[Sampled]:
        for name in unwanted:
            self._flying.pop(name, None)
        self._flying |= {one.name: _Flying(one, list(one.prompt), []) for one in wanted}
        done = [ended for flying in self._flying.values() if (ended := self._advanced(flying)) is not None]
        for one in done:
            del self._flying[one.name]
        return done

    def _advanced(self, flying: _Flying) -> Sampled | None:
        """One token more; the sample, if it ends with that."""
        options = flying.asked.sampling_params
        if options.get("prompt_logprobs") is not None:
            return Sampled(flying.asked.name, (), (), [], "length", [0.0, *self.scored(flying.tokens)])
        numbers = (options[name] for name in ("temperature", "top_p", "top_k", "seed", "max_tokens"))
        asked = stand_in.Asked(flying.tokens, *numbers, options["stop_token_ids"], options["logprobs"])
        found = flying.found
        found.append(self._next(flying.tokens, len(found), asked))
        flying.tokens.append(found[-1].token)
        has_stopped = found[-1].token in asked.stop_ids
        if not has_stopped and len(found) < asked.max_tokens:
            return None
        tokens, logprobs = tuple(t.token for t in found), tuple(t.logprob for t in found)
        return Sampled(flying.asked.name, tokens, logprobs, spans_of(found), "stop" if has_stopped else "length", [])

    def update(self, weights: WeightSource, label: str) -> int:
        try:
            given = {name: tuple(tensor.shape) for name, tensor in weights}
            check_fits(given, self._own, tied=bool(self.model.config.tie_word_embeddings))
        except WrongWeights as error:
            raise ModelError(f"weights do not fit the model of vLLM in this process: {error}") from None
        self.take(weights)
        self.label = label
        return sum(tensor.nbytes for _, tensor in weights)

    def label_now(self) -> str:
        return self.label

    def sleep(self) -> None:
        assert self._can_sleep, "a vLLM that was not started for it cannot"
        self.did["sleep"] += 1

    def wake_up(self) -> None:
        self.did["wake_up"] += 1

    def close(self) -> None:
        self.did["close"] += 1


@contextmanager
def in_place_of_vllm() -> Iterator[None]:
    """Within it engines of this process take a stand-in for vLLM."""
    before: Callable[..., Any] = VLLMInProcess.core
    VLLMInProcess.core = CoreStandIn
    try:
        yield
    finally:
        VLLMInProcess.core = before
