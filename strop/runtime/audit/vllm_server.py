"""A small server that answers as a vLLM server does that strop samples in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strop.engines.vllm.remote.strop_weights import Inbox, Parcel, WrongWeights, shapes_in
from strop.runtime.audit import stand_in
from strop.runtime.audit.stand_in import Asked, spans_of
from strop.runtime.audit.teacher_server import MAX_MODEL_LEN, Refused


class StandIn(stand_in.StandIn):
    """In vLLM's words; see `stand_in.StandIn`."""

    def __init__(self, folder: Path, *, at_temperature: bool = True) -> None:
        self._own = shapes_in(folder)
        super().__init__(folder, at_temperature=at_temperature)

    def forget(self) -> None:
        self._inbox, self._keeps_copy = Inbox(self._own, tied=bool(self.model.config.tie_word_embeddings)), False

    def on_v1_models(self, body: Any, query: dict[str, str]) -> Any:
        return {"data": [{"id": self.name, "max_model_len": MAX_MODEL_LEN}]}

    def on_weight_info(self, body: Any, query: dict[str, str]) -> Any:
        return {"weight_version": self.label}

    def on_init_weight_transfer_engine(self, body: Any, query: dict[str, str]) -> None:
        self.forget()
        self._keeps_copy = body["init_info"]["keeps_copy"]

    def on_pause(self, body: Any, query: dict[str, str]) -> None:
        mode = query["mode"]
        with self.changed:
            self.seen[f"pause {mode}"] += 1
            self.is_paused = mode != "wait"
            self.num_aborts += mode == "abort"
            self.changed.notify_all()
            self.changed.wait_for(lambda: mode == "keep" or self.num_in_flight == 0)
            self.is_paused = True

    def on_resume(self, body: Any, query: dict[str, str]) -> None:
        with self.changed:
            self.is_paused = False
            self.changed.notify_all()

    def on_sleep(self, body: Any, query: dict[str, str]) -> None:
        self.seen[f"sleep {query['level']}"] += 1

    def on_wake_up(self, body: Any, query: dict[str, str]) -> None:
        self.seen["wake_up"] += 1

    def on_start_weight_update(self, body: Any, query: dict[str, str]) -> None:
        if self.is_updating:
            raise Refused(500, "A weight update is already active.")
        self.is_updating = True

    def on_update_weights(self, body: Any, query: dict[str, str]) -> None:
        if not self.is_updating:
            raise Refused(500, "No weight update is active.")
        parcel = Parcel(**body["update_info"])
        self.seen[f"{parcel.kind} weights in {Path(parcel.folder).parent.parent}"] += 1
        with self.changed:
            try:
                self._inbox.check(parcel)
                self.take(self._inbox.take(parcel, keep=self._keeps_copy))
            except WrongWeights as error:
                said = f"Worker failed with error '{error}', please check the stack trace above for the root cause"
                raise Refused(500, said) from error

    def on_finish_weight_update(self, body: Any, query: dict[str, str]) -> None:
        if not self.is_updating:
            raise Refused(500, "No weight update is active.")
        self.is_updating, self.label = False, body["weight_version"] if body else self.label

    def on_inference_v1_generate(self, body: Any, query: dict[str, str]) -> Any:
        prompt, options = body["token_ids"], body["sampling_params"]
        if options.get("prompt_logprobs") is not None:
            scores = zip(prompt[1:], self.scored(prompt), strict=True)
            return {"choices": [], "prompt_logprobs": [None, *({str(t): {"logprob": s}} for t, s in scores)]}
        numbers = (options[name] for name in ("temperature", "top_p", "top_k", "seed", "max_tokens"))
        found, reason = self.sampled(Asked(prompt, *numbers, options.get("stop_token_ids", ()), options["logprobs"]))
        content = [
            {
                "token_id": t.token,
                "logprob": t.logprob,
                "top_logprobs": [{"logprob": x} for x in (t.logprob, *t.likely)],
            }
            for t in found
        ]
        choice = {"token_ids": [t.token for t in found], "logprobs": {"content": content}, "finish_reason": reason}
        return {"choices": [{**choice, "weight_versions": spans_of(found)}]}
