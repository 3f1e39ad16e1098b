"""One SGLang server: what it is asked, and what its answers mean."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2

from strop.engines.served.server import HOW_TO_START, IMPOSSIBLE, Server
from strop.engines.sglang.samples import GENERATE, read_sample, sample_body
from strop.types import EngineError, ModelError, UserError


class SGLangServer(Server):
    """A server of SGLang.

    Args:
        client: of the event loop that asks.
        address: http://host:port.
        timeout_s: of one answer; `engine.request_timeout_s`.
        flags: with which it must have been started (True) or not (False).
        is_router: it stands before servers: what becomes of them it reports as its own.
    """

    name, length_flag = "SGLang", "--context-length"
    at_temperature = "start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
    generate, sample_body, read_sample = GENERATE, staticmethod(sample_body), staticmethod(read_sample)

    def __init__(
        self,
        client: httpx2.AsyncClient,
        address: str,
        *,
        timeout_s: float,
        flags: Mapping[str, bool],
        is_router: bool = False,
    ) -> None:
        super().__init__(client, address, timeout_s=timeout_s, is_router=is_router)
        self._flags = flags
        self.num_ranks = 1  # processes that hold its model, divided by tensor parallelism
        self.num_copies = 1  # and how often, or by layers: not as one group would take it

    async def is_up(self) -> bool:
        """One that an earlier run left paused says that it is well only once it goes on."""
        if not await self.answers("/model_info"):
            return False
        await self.resume()
        return await self.is_healthy()

    async def greet(self) -> None:
        try:
            info = await self.ask("GET", "/server_info")
            self.max_positions, self.num_ranks = int(info["max_req_input_len"]), int(info["tp_size"])
            self.num_copies = int(info["pp_size"]) * int(info["dp_size"])
            wrong = [
                f"{'with' if wanted else 'without'} {flag}"
                for flag, wanted in self._flags.items()
                if bool(info[flag.removeprefix("--").replace("-", "_")]) is not wanted
            ]
        except (KeyError, TypeError, ValueError) as error:
            fault = f"{type(error).__name__}: {error}"
            raise UserError(
                f"{self!r} must be an SGLang server; its answer is not in that protocol ({fault})."
            ) from error
        if wrong:
            raise UserError(f"{self!r} must be started {' and '.join(wrong)}, as [engine] says. {HOW_TO_START}")
        await self.resume()
        self.label = ""

    async def workers(self) -> list[str]:
        """The addresses of the servers behind it, where it is a router."""
        try:
            return [str(worker["url"]) for worker in (await self.ask("GET", "/workers"))["workers"]]
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise UserError(
                f"{self!r} must be an SGLang router; its answer is not in that protocol ({error})."
            ) from error

    async def pause(self, mode: str) -> None:
        """What it remembers of prompts is dropped, but for samples that go on from it (in_place)."""
        await self.ask("POST", "/pause_generation", {"mode": mode})
        if mode != "in_place":
            await self.send("POST", "/flush_cache", timeout=f"{self.timeout_s:g}")

    async def resume(self) -> None:
        await self.ask("POST", "/continue_generation", {})

    async def sleep(self) -> None:
        await self.ask("POST", "/release_memory_occupation", {})

    async def wake_up(self) -> None:
        await self.ask("POST", "/resume_memory_occupation", {})

    async def label_now(self) -> str:
        return str((await self.ask("GET", "/model_info"))["weight_version"])

    # ---- samples ------------------------------------------------------------------------------------------------------

    async def score(self, tokens: Sequence[int], label: str) -> list[float]:
        asked = {"temperature": 1.0, "max_new_tokens": 0}
        body = {"input_ids": list(tokens), "sampling_params": asked, "extra_key": label}
        answer = await self.ask("POST", GENERATE, {**body, "return_logprob": True, "logprob_start_len": 0})
        entries = answer["meta_info"]["input_token_logprobs"]
        found = [0.0, *(-math.inf if logprob is None else logprob for logprob, *_ in entries[1:])]
        if [token for _, token, *_ in entries] != list(tokens):
            raise EngineError(f"{self!r} must score the tokens that it is given.")
        return [logprob if logprob > IMPOSSIBLE else -math.inf for logprob in found]

    async def likely(self, prompt: Sequence[int], temperature: float) -> list[float]:
        sampling = {"temperature": temperature, "top_p": 1.0, "top_k": -1, "max_new_tokens": 1, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 4}
        answer = await self.ask("POST", GENERATE, body)
        return [logprob for logprob, *_ in answer["meta_info"]["output_top_logprobs"][0]]

    # ---- weights ------------------------------------------------------------------------------------------------------

    async def read(self, folder: str, label: str) -> None:
        """Have it read weights, under a label that it then reports with every token.

        Raises:
            ModelError: it cannot.
            EngineError: it read them and says another label.
        """
        body = {"model_path": folder, "weight_version": label, "flush_cache": False}
        await self.ask_worker("/update_weights_from_disk", body)
        await self.check_label(label)

    async def join(self, group: Mapping[str, Any]) -> None:
        """Have its ranks join a group of processes that weights are sent in."""
        await self.ask_worker("/init_weights_update_group", dict(group))

    async def receive(self, group: str, named: Sequence[tuple[str, Any]], label: str | None) -> None:
        """Have its ranks receive tensors that are sent in a group, in this order; with the last ones comes their label."""
        body = {
            "names": [name for name, _ in named],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
            "shapes": [list(tensor.shape) for _, tensor in named],
            "group_name": group,
            "flush_cache": False,
            "weight_version": label,
        }
        await self.ask_worker("/update_weights_from_distributed", body)

    async def begin_update(self) -> None:
        """Say that tensors will come. An update that an earlier run left half made is ended first: this one gives all."""
        try:
            await self.ask("POST", "/begin_weight_update", {})
        except EngineError as error:
            if "already open" not in str(error):
                raise
            await self.end_update()
            await self.ask("POST", "/begin_weight_update", {})

    async def end_update(self) -> None:
        await self.ask_worker("/end_weight_update", {})

    async def ask_worker(self, path: str, body: dict[str, Any]) -> None:
        """Have the ranks do something with weights; what they refuse is a ModelError."""
        try:
            await self.ask("POST", path, body)
        except EngineError as error:
            raise ModelError(f"weights do not fit the model of {self!r}: {error}") from error
