"""A small server that answers as an SGLang server does that strop samples in, by the protocol of SGLang 0.5.23."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from strop.runtime.audit import stand_in
from strop.runtime.audit.stand_in import Asked, spans_of
from strop.runtime.audit.teacher_server import MAX_MODEL_LEN, Answer, Dropped, Refused

_SHARES_MAX_INPUT = 6  # positions that SGLang keeps back of those of the model
# What a router passes on of a request; of what it does not know, nothing.
_PASSED_ON = ("input_ids", "sampling_params", "return_logprob", "top_logprobs_num", "stream", "extra_key")
_WORDS = {"success": True, "message": "Success"}


class StandIn(stand_in.StandIn):
    """In SGLang's words; see `stand_in.StandIn`.

    Args:
        folder: of the model.
        at_temperature: whether log-probabilities are those at the sampling temperature.
        info: what it says of how it was started, where that is not what strop starts servers with.
    """

    def __init__(self, folder: Path, *, at_temperature: bool = True, **info: Any) -> None:
        self._info = {
            "max_req_input_len": MAX_MODEL_LEN - _SHARES_MAX_INPUT,
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": 1,
            "enable_deterministic_inference": True,
            "enable_memory_saver": True,
            "enable_weights_cpu_backup": True,
            **info,
        }
        super().__init__(folder, at_temperature=at_temperature)

    def was_started_as(self, words: str) -> None:
        """Say of itself what the arguments of its start say."""
        for name in ("enable_deterministic_inference", "enable_memory_saver", "enable_weights_cpu_backup"):
            self._info[name] = f"--{name.replace('_', '-')}" in words

    def forget(self) -> None:
        self.is_resting, self._stream = False, count()
        self._read = dict[Any, str]()  # prompts that are remembered, by the weights that read them

    def on_health(self, body: Any, query: dict[str, str]) -> Any:
        """It samples a token to know that it is well: paused, or without memory, it is not."""
        if self.is_paused or self.is_resting:
            raise Refused(503, "Service Unavailable")
        return None

    def on_model_info(self, body: Any, query: dict[str, str]) -> Any:
        return {"model_path": self.name, "weight_version": self.label, "is_generation": True}

    def on_server_info(self, body: Any, query: dict[str, str]) -> Any:
        return self._info

    def on_pause_generation(self, body: Any, query: dict[str, str]) -> Any:
        mode = body["mode"]
        with self.changed:
            self.seen[f"pause {mode}"] += 1
            self.is_paused, self.pause_mode = True, mode
            self.num_aborts += mode == "abort"
            self.changed.notify_all()
            self.changed.wait_for(lambda: mode != "abort" or self.num_in_flight == 0)
        return {"message": "Generation paused successfully.", "status": "ok"}

    def on_continue_generation(self, body: Any, query: dict[str, str]) -> Any:
        with self.changed:
            self.is_paused = False
            self.changed.notify_all()
        return {"message": "Generation continued successfully.", "status": "ok"}

    def on_flush_cache(self, body: Any, query: dict[str, str]) -> Any:
        if self.num_in_flight and not (self.is_paused and self.pause_mode == "retract"):
            raise Refused(400, "Flush cache failed.")
        self.seen["flush_cache"] += 1
        self._read.clear()
        return "Cache flushed."

    def on_release_memory_occupation(self, body: Any, query: dict[str, str]) -> None:
        if self.num_in_flight or not self._info["enable_memory_saver"]:
            raise Refused(500, "release_memory_occupation should be called only when server is idle.")
        self.seen["release_memory_occupation"] += 1
        self.is_resting = True

    def on_resume_memory_occupation(self, body: Any, query: dict[str, str]) -> None:
        if not self.is_resting:
            raise Refused(500, "KeyError: 'kv_cache'")
        self.seen["resume_memory_occupation"] += 1
        self.is_resting = False

    # ---- weights ------------------------------------------------------------------------------------------------------

    def on_update_weights_from_disk(self, body: Any, query: dict[str, str]) -> Any:
        """Tensors that its model has not are passed over, as SGLang's loaders of most models do."""
        folder = Path(body["model_path"])
        files = sorted(folder.glob("*.safetensors"))
        self.seen[f"weights in {folder.parent.parent}"] += 1
        if not files:
            raise Refused(400, f"Failed to get weights iterator: Cannot find any model weights with `{folder}`.")
        self._check_flush(body)
        with self.changed:
            try:
                for file in files:
                    self.take(load_file(file).items())
            except RuntimeError as error:  # another shape
                raise Refused(400, f"Failed to update weights: {error}.\nRolling back to original weights.") from error
            self.label = body["weight_version"]
        return {**_WORDS, "num_paused_requests": 0}

    def on_begin_weight_update(self, body: Any, query: dict[str, str]) -> Any:
        if self.is_updating:
            raise Refused(400, "a weight-update session is already open; call end_weight_update() first")
        self.is_updating = True
        return _WORDS

    def on_end_weight_update(self, body: Any, query: dict[str, str]) -> Any:
        if not self.is_updating:
            raise Refused(400, "no weight-update session is open; call begin_weight_update() first")
        self.is_updating = False
        return _WORDS

    def on_update_weights_from_distributed(self, body: Any, query: dict[str, str]) -> Any:
        if not self.is_updating:
            raise Refused(
                400, "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            )
        self._check_flush(body)
        types = [getattr(torch, name) for name in body["dtypes"]]
        sent = [torch.empty(shape, dtype=kind) for shape, kind in zip(body["shapes"], types, strict=True)]
        self.receive(body["group_name"], sent)
        with self.changed:
            self.take(zip(body["names"], sent, strict=True))
            self.label = body["weight_version"] or self.label
        return _WORDS

    def receive(self, group: str, into: list[torch.Tensor]) -> None:
        """Fill tensors with what is sent in a group; nobody joins one here."""
        raise Refused(400, f"Failed to receive weights: Group {group} not in [].")

    def _check_flush(self, body: Any) -> None:
        if body["flush_cache"] and self.num_in_flight:
            raise Refused(
                400, "Weights were updated, but the cache was not flushed because requests are still running."
            )

    # ---- samples ------------------------------------------------------------------------------------------------------

    def on_generate(self, body: Any, query: dict[str, str]) -> Any:
        prompt, options = body["input_ids"], body["sampling_params"]
        if self.is_resting:
            raise Refused(500, "its memory is released")
        if body.get("logprob_start_len") == 0:
            scores = [None, *self.scored(prompt)]
            about = {"input_token_logprobs": [[s, t, None] for s, t in zip(scores, prompt, strict=True)]}
            return {"text": "", "output_ids": [], "meta_info": about}
        if options["top_k"] == 0 or options["temperature"] < 0:
            raise Refused(400, f"top_k must be -1 (disable) or at least 1, got {options['top_k']}.")
        self.seen["prompts of other weights"] += (
            self._read.setdefault((body.get("extra_key"), *prompt), self.label) != self.label
        )
        asked = Asked(
            prompt,
            temperature=options["temperature"],
            top_p=options["top_p"],
            top_k=max(options["top_k"], 0),
            seed=options.get("sampling_seed", 42)
            if self._info["enable_deterministic_inference"]
            else next(self._stream),
            max_tokens=options["max_new_tokens"],
            stop_ids=() if options["ignore_eos"] else {*options.get("stop_token_ids", ()), *self._own_ends()},
            num_likely=body.get("top_logprobs_num", 0),
        )
        found, reason = self.sampled(asked)
        about = {
            "finish_reason": {
                "stop": {"type": "stop", "matched": found[-1].token if found else None},
                "length": {"type": "length", "length": asked.max_tokens},
                "abort": {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
            }[reason],
            "prompt_tokens": len(prompt),
            "completion_tokens": len(found),
            "weight_version": self.label,
            "weight_versions": spans_of(found) or [{"version": self.label, "start": 0, "end": 0}],
            "input_token_logprobs": [],
            "output_token_logprobs": [[t.logprob, t.token, None] for t in found],
            "output_top_logprobs": [[[x, 0, None] for x in t.likely] for t in found],
        }
        return {"text": "", "output_ids": [t.token for t in found], "meta_info": about}

    def _own_ends(self) -> set[int]:
        """End ids of its model, which end a sample whatever is asked for."""
        own = self.model.generation_config.eos_token_id
        return set(own) if isinstance(own, list) else {own} - {None}


class RouterStandIn:
    """A router before servers, as SGLang's is: samples go to one after the other.

    Args:
        workers: address to what answers there.
    """

    def __init__(self, workers: Mapping[str, Answer]) -> None:
        self._workers, self.num_routed = workers, 0

    def __call__(self, path: str, body: Any) -> Any:
        if path == "/health":
            return None
        if path == "/workers":
            found = [{"id": str(n), "url": address, "is_healthy": True} for n, address in enumerate(self._workers)]
            return {"workers": found, "total": len(found)}
        if path != "/generate":
            raise Refused(404, "Not Found")
        self.num_routed += 1
        places = list(self._workers)
        try:
            asked = {name: body[name] for name in _PASSED_ON if name in body}
            return self._workers[places[self.num_routed % len(places)]](path, asked)
        except Dropped as error:
            raise Refused(503, "no worker answers") from error
