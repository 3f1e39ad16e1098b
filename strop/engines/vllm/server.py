"""One vLLM server: what it is asked, and what its answers mean."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from strop.engines.remote_logprobs import read_prompt_logprobs
from strop.engines.served.server import HOW_TO_START, Server
from strop.engines.vllm.samples import GENERATE, SCORE, read_sample, sample_body
from strop.types import EngineError, ModelError, UserError

_REFUSED = "Worker failed with error '"  # before what a worker says, in what vLLM says


class VLLMServer(Server):
    """A server of vLLM in its development mode, which has the paths for weights."""

    name, length_flag = "vLLM", "--max-model-len"
    at_temperature = "start it with --logprobs-mode processed_logprobs"
    generate, sample_body, read_sample = GENERATE, staticmethod(sample_body), staticmethod(read_sample)

    async def greet(self) -> None:
        try:
            models = await self.ask("GET", "/v1/models")
            self.max_positions = int(models["data"][0].get("max_model_len") or 0)
            await self.ask("GET", "/weight_info")
        except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
            raise UserError(f"{self!r} must be a vLLM server; its answer is not in that protocol ({error}).") from error
        await self.resume()
        self.label = self.checksum = ""

    async def pause(self, mode: str) -> None:
        await self.ask("POST", "/pause", mode=mode)

    async def resume(self) -> None:
        await self.ask("POST", "/resume")

    async def sleep(self) -> None:
        await self.ask("POST", "/sleep", level="1")

    async def wake_up(self) -> None:
        await self.ask("POST", "/wake_up")

    async def label_now(self) -> str:
        return str((await self.ask("GET", "/weight_info"))["weight_version"])

    # ---- samples ------------------------------------------------------------------------------------------------------

    async def score(self, tokens: Sequence[int], label: str) -> list[float]:
        body = {"token_ids": list(tokens), "sampling_params": SCORE, "cache_salt": label}
        return read_prompt_logprobs((await self.ask("POST", GENERATE, body))["prompt_logprobs"], tokens)

    async def likely(self, prompt: Sequence[int], temperature: float) -> list[float]:
        sampling = {"temperature": temperature, "top_p": 1.0, "top_k": 0, "seed": 0, "max_tokens": 1, "logprobs": 4}
        answer = await self.ask("POST", GENERATE, {"token_ids": list(prompt), "sampling_params": sampling})
        entries = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return sorted((entry["logprob"] for entry in entries), reverse=True)[:4]

    # ---- weights ------------------------------------------------------------------------------------------------------

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
