"""What stands for a server of an engine: it answers as one does, and really samples: from a model folder, by the numbers that
the engine `torch` draws, so that the two can be compared sample by sample."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from strop.engines.sampling import sample, uniforms
from strop.runtime.audit.teacher_server import Refused

Spoil = Callable[[str, Any, Callable[[], Any]], Any]  # path, body and whatever makes the answer, to the answer


class Asked(NamedTuple):
    """One sample, in no server's words."""

    prompt: list[int]
    temperature: float
    top_p: float
    top_k: int  # 0 keeps all
    seed: int
    max_tokens: int
    stop_ids: Collection[int]
    num_likely: int  # log-probabilities of so many likeliest tokens beside that of the sampled one


class Token(NamedTuple):
    """What one token of a sample came with."""

    token: int
    logprob: float
    likely: list[float]
    label: str  # of the weights that sampled it


class StandIn(ABC):
    """A model folder behind the paths that strop asks, for as many threads as come. A path is answered by the method that is
    named after it.

    Args:
        folder: of the model.
        at_temperature: whether log-probabilities are those at the sampling temperature.
    """

    def __init__(self, folder: Path, *, at_temperature: bool = True) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._start = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        self.name, self._at_temperature = folder.name, at_temperature
        self._num_begun = 0
        self.changed = threading.Condition()  # guards the model and what `begin` sets
        self.begin()

    def begin(self, spoil: Spoil | None = None, *, token_s: float = 0.0) -> None:
        """Be as one that was just started. From here on `spoil` stands between a request and its answer, and a token takes
        `token_s` longer."""
        with self.changed:
            self.take(self._start.items())
            self.token_s, self.spoil = token_s, spoil
            self.seen = Counter[str]()  # what it was asked to do, but for sampling
            self.num_in_flight = self.num_sampled = self.num_aborts = self._num_started = 0
            self.is_paused = self.is_updating = False
            self._num_begun += 1
            self.label = "default"
            self.forget()
            self.changed.notify_all()

    @abstractmethod
    def forget(self) -> None:
        """Have what a kind of server holds beside this be as it was in the beginning."""

    @torch.no_grad()
    def take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take weights, by their names; a tied head follows its embedding."""
        own = dict(self.model.named_parameters())
        for name, tensor in weights:
            if name in own:
                own[name].copy_(tensor)

    def knows(self, path: str) -> bool:
        """True for a path that it answers."""
        return self._act(path) is not None

    def _act(self, path: str) -> Any:
        return getattr(self, "on" + urlsplit(path).path.replace("/", "_").replace("-", "_"), None)

    def __call__(self, path: str, body: Any) -> Any:
        where, act = urlsplit(path), self._act(path)
        if act is None:
            raise Refused(404, "Not Found")
        query = {name: values[0] for name, values in parse_qs(where.query).items()}
        answer = lambda: act(body, query)  # noqa: E731
        return answer() if self.spoil is None else self.spoil(where.path, body, answer)

    def on_audit_started(self, body: Any, query: dict[str, str]) -> int:
        """Of the audit, not of a server: a program that stands for one says how it was started, and is told the how manieth it
        is, from 0."""
        self._num_started += 1
        self.seen[f"started as {body}"] += 1
        return self._num_started - 1

    def on_health(self, body: Any, query: dict[str, str]) -> Any:
        return {}

    # ---- samples ------------------------------------------------------------------------------------------------------

    def sampled(self, asked: Asked) -> tuple[list[Token], str]:
        """One token after the other, each by the weights that are there then, and why that ended."""
        with self.changed:
            self.changed.wait_for(lambda: not self.is_paused)
            self.num_in_flight += 1
            aborts, begun = self.num_aborts, self._num_begun
        try:
            return self._sampled(asked, aborts)
        finally:
            with self.changed:
                self.num_in_flight -= self._num_begun == begun  # else nobody waits for it any more
                self.changed.notify_all()

    def _sampled(self, asked: Asked, aborts: int) -> tuple[list[Token], str]:
        found: list[Token] = []
        tokens = list(asked.prompt)
        while len(found) < asked.max_tokens:
            with self.changed:
                self.changed.wait_for(lambda: not self.is_paused or self.num_aborts != aborts)
                if self.num_aborts != aborts:
                    return found, "abort"
                found.append(self._next(tokens, len(found), asked))
                self.num_sampled += 1
            tokens.append(found[-1].token)
            time.sleep(self.token_s)
            if tokens[-1] in asked.stop_ids:
                return found, "stop"
        return found, "length"

    @torch.inference_mode()
    def _next(self, tokens: list[int], place: int, asked: Asked) -> Token:
        logits = self.model(torch.tensor([tokens]), use_cache=False).logits[:, -1]
        heat = torch.tensor([float(asked.temperature)])
        tail = (torch.tensor([asked.top_p]), torch.tensor([asked.top_k]))
        uniform = uniforms(np.array([asked.seed], dtype=np.uint64), np.array([place]))
        found, logprobs = sample(logits, uniform, temperature=heat, tail=tail)
        if not self._at_temperature:
            logprobs = logits.log_softmax(-1).gather(-1, found[:, None])[0]
        likely = (logits / (heat if self._at_temperature else 1)).log_softmax(-1)[0].topk(asked.num_likely).values
        return Token(int(found), float(logprobs), likely.tolist(), self.label)

    @torch.inference_mode()
    def scored(self, tokens: list[int]) -> list[float]:
        """Log-probability of each token but the first."""
        with self.changed:
            rows = self.model(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
        return [float(row[token]) for token, row in zip(tokens[1:], rows[:-1], strict=True)]


def spans_of(found: list[Token]) -> list[dict[str, Any]]:
    """Which tokens weights of one label sampled, as servers say it."""
    spans, end = [], 0
    for label, same in groupby(token.label for token in found):
        start, end = end, end + len(list(same))
        spans.append({"version": label, "start": start, "end": end})
    return spans
