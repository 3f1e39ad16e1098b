"""A small server that answers as a vLLM server does that strop samples in, and really samples: from a model folder, by the
numbers that the engine `torch` draws, so that the two can be compared sample by sample."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from strop.engines.sampling import sample, uniforms
from strop.engines.vllm.remote.strop_weights import Inbox, Parcel, WrongWeights, shapes_in
from strop.runtime.audit.teacher_server import MAX_MODEL_LEN, Refused

Spoil = Callable[[str, Any, Callable[[], Any]], Any]  # path, body and whatever makes the answer, to the answer


class StandIn:
    """A model folder behind the paths that strop asks, for as many threads as come.

    Args:
        folder: of the model.
        at_temperature: whether log-probabilities are those at the sampling temperature.
    """

    def __init__(self, folder: Path, *, at_temperature: bool = True) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._start = {name: tensor.detach().clone() for name, tensor in self._model.named_parameters()}
        self._name, self._own, self._at_temperature = folder.name, shapes_in(folder), at_temperature
        self._tied = bool(self._model.config.tie_word_embeddings)
        self._num_begun = 0
        self._changed = threading.Condition()  # guards the model and what `begin` sets
        self.begin()

    def begin(self, spoil: Spoil | None = None, *, token_s: float = 0.0) -> None:
        """Be as one that was just started. From here on `spoil` stands between a request and its answer, and a token takes
        `token_s` longer."""
        with self._changed, torch.no_grad():
            for name, tensor in self._model.named_parameters():
                tensor.copy_(self._start[name])
            self.token_s, self.spoil, self.seen = (
                token_s,
                spoil,
                Counter[str](),
            )  # what it was asked to do, but for sampling
            self.num_in_flight, self.num_sampled, self._num_aborts, self._is_paused, self._is_updating = (
                0,
                0,
                0,
                False,
                False,
            )
            self._num_started, self._num_begun = 0, self._num_begun + 1
            self._label, self._inbox, self._keeps_copy = "default", Inbox(self._own, tied=self._tied), False
            self._changed.notify_all()

    def __call__(self, path: str, body: Any) -> Any:
        where = urlsplit(path)
        act = getattr(self, "_on" + where.path.replace("/", "_"), None)
        if act is None:
            raise Refused(404, "Not Found")
        query = {name: values[0] for name, values in parse_qs(where.query).items()}
        answer = lambda: act(body, query)  # noqa: E731
        return answer() if self.spoil is None else self.spoil(where.path, body, answer)

    def _on_audit_started(self, body: Any, query: dict[str, str]) -> int:
        """Of the audit, not of vLLM: a program that stands for a server of vLLM's says how it was started, and is told the how
        manieth it is, from 0."""
        self._num_started += 1
        self.seen[f"started as {body}"] += 1
        return self._num_started - 1

    def _on_health(self, body: Any, query: dict[str, str]) -> Any:
        return {}

    def _on_v1_models(self, body: Any, query: dict[str, str]) -> Any:
        return {"data": [{"id": self._name, "max_model_len": MAX_MODEL_LEN}]}

    def _on_weight_info(self, body: Any, query: dict[str, str]) -> Any:
        return {"weight_version": self._label}

    def _on_init_weight_transfer_engine(self, body: Any, query: dict[str, str]) -> None:
        self._inbox, self._keeps_copy = Inbox(self._own, tied=self._tied), body["init_info"]["keeps_copy"]

    def _on_pause(self, body: Any, query: dict[str, str]) -> None:
        mode = query["mode"]
        with self._changed:
            self.seen[f"pause {mode}"] += 1
            self._is_paused = mode != "wait"
            self._num_aborts += mode == "abort"
            self._changed.notify_all()
            self._changed.wait_for(lambda: mode == "keep" or self.num_in_flight == 0)
            self._is_paused = True

    def _on_resume(self, body: Any, query: dict[str, str]) -> None:
        with self._changed:
            self._is_paused = False
            self._changed.notify_all()

    def _on_sleep(self, body: Any, query: dict[str, str]) -> None:
        self.seen[f"sleep {query['level']}"] += 1

    def _on_wake_up(self, body: Any, query: dict[str, str]) -> None:
        self.seen["wake_up"] += 1

    def _on_start_weight_update(self, body: Any, query: dict[str, str]) -> None:
        if self._is_updating:
            raise Refused(500, "A weight update is already active.")
        self._is_updating = True

    def _on_update_weights(self, body: Any, query: dict[str, str]) -> None:
        if not self._is_updating:
            raise Refused(500, "No weight update is active.")
        parcel, own = Parcel(**body["update_info"]), dict(self._model.named_parameters())
        self.seen[f"{parcel.kind} weights in {Path(parcel.folder).parent.parent}"] += 1
        with self._changed, torch.no_grad():
            try:
                self._inbox.check(parcel)
                for name, tensor in self._inbox.take(parcel, keep=self._keeps_copy):
                    if name in own:  # a tied head follows its embedding
                        own[name].copy_(tensor)
            except WrongWeights as error:
                said = f"Worker failed with error '{error}', please check the stack trace above for the root cause"
                raise Refused(500, said) from error

    def _on_finish_weight_update(self, body: Any, query: dict[str, str]) -> None:
        if not self._is_updating:
            raise Refused(500, "No weight update is active.")
        self._is_updating, self._label = False, body["weight_version"] if body else self._label

    def _on_inference_v1_generate(self, body: Any, query: dict[str, str]) -> Any:
        prompt, options = body["token_ids"], body["sampling_params"]
        if options.get("prompt_logprobs") is not None:
            return {"choices": [], "prompt_logprobs": self._prompt_logprobs(prompt)}
        with self._changed:
            self._changed.wait_for(lambda: not self._is_paused)
            self.num_in_flight += 1
            aborts, begun = self._num_aborts, self._num_begun
        try:
            content, labels, reason = self._sampled(prompt, options, aborts)
        finally:
            with self._changed:
                self.num_in_flight -= self._num_begun == begun  # else nobody waits for it any more
                self._changed.notify_all()
        versions, end = [], 0
        for label, same in groupby(labels):
            start, end = end, end + len(list(same))
            versions.append({"version": label, "start": start, "end": end})
        choice = {"token_ids": [entry["token_id"] for entry in content], "logprobs": {"content": content}}
        return {"choices": [{**choice, "finish_reason": reason, "weight_versions": versions}]}

    def _sampled(self, prompt: list[int], options: dict[str, Any], aborts: int) -> tuple[list[Any], list[str], str]:
        """One token after the other, each by the weights that are there then."""
        content: list[Any] = []
        labels: list[str] = []
        tokens = list(prompt)
        while len(content) < options["max_tokens"]:
            with self._changed:
                self._changed.wait_for(lambda: not self._is_paused or self._num_aborts != aborts)
                if self._num_aborts != aborts:
                    return content, labels, "abort"
                content.append(self._next(tokens, len(content), options))
                labels.append(self._label)
                self.num_sampled += 1
            tokens.append(content[-1]["token_id"])
            time.sleep(self.token_s)
            if tokens[-1] in options.get("stop_token_ids", ()):
                return content, labels, "stop"
        return content, labels, "length"

    @torch.inference_mode()
    def _next(self, tokens: list[int], place: int, options: dict[str, Any]) -> dict[str, Any]:
        logits = self._model(torch.tensor([tokens]), use_cache=False).logits[:, -1]
        heat = torch.tensor([float(options["temperature"])])
        tail = (torch.tensor([options["top_p"]]), torch.tensor([options["top_k"]]))
        uniform = uniforms(np.array([options["seed"]], dtype=np.uint64), np.array([place]))
        found, logprobs = sample(logits, uniform, temperature=heat, tail=tail)
        if not self._at_temperature:
            logprobs = logits.log_softmax(-1).gather(-1, found[:, None])[0]
        likely = (logits / (heat if self._at_temperature else 1)).log_softmax(-1)[0].topk(options["logprobs"]).values
        token, logprob = int(found), float(logprobs)
        return {
            "token_id": token,
            "logprob": logprob,
            "top_logprobs": [{"logprob": number} for number in (logprob, *likely.tolist())],
        }

    @torch.inference_mode()
    def _prompt_logprobs(self, tokens: list[int]) -> list[Any]:
        with self._changed:
            rows = self._model(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
        return [None, *({str(t): {"logprob": float(row[t])}} for t, row in zip(tokens[1:], rows[:-1], strict=True))]
