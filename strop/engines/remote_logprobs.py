"""Log-probabilities of given tokens from a server that speaks vLLM's HTTP protocol (vllm serve): token ids in, numbers out.

Used of it: GET /v1/models, POST /detokenize, and POST /v1/completions with `prompt` = token ids and `prompt_logprobs`. The
server scores at temperature 1, whatever temperature a request names.
"""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from strop.engines.threads import map_in_threads
from strop.types import UserError

T = TypeVar("T")

MOST_IN_FLIGHT = 32  # requests; the server batches them as it likes
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 30.0  # before a request is sent again, doubled each time
_IMPOSSIBLE = -9999.0  # how the server writes minus infinity
# No proxy of the environment: an engine stands in the same network, often on the same machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class RemoteLogprobs:
    """A server's log-probabilities of token sequences.

    Args:
        address: http://host:port.
        option: what messages call it.
        timeout_s: deadline of one request.
        num_retries: how often a request is sent again after a timeout, a lost connection or a fault of the server (HTTP 5xx,
            408, 429).

    Raises:
        UserError: the server cannot be reached, or serves no model.
    """

    def __init__(self, address: str, *, option: str, timeout_s: float, num_retries: int) -> None:
        self.address, self.option = address.rstrip("/"), option
        self._timeout_s, self._num_retries = timeout_s, num_retries
        self.model, self.max_positions = self._ask("/v1/models", None, _model_of)

    def __repr__(self) -> str:
        return f"{self.option} = {self.address}"

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self._ask("/detokenize", {"model": self.model, "tokens": list(tokens)}, _text_of)

    def logprobs(
        self, sequences: Sequence[Sequence[int]], *, advance: Callable[[int], None] = lambda done: None
    ) -> list[list[float]]:
        """The log-probability of every token of every sequence, given the tokens before it; 0.0 of the first.

        Raises:
            UserError: the server failed, or its answer is not what was asked for.
        """
        return map_in_threads(self._logprobs_of, sequences, num_threads=MOST_IN_FLIGHT, advance=advance)

    def _logprobs_of(self, tokens: Sequence[int]) -> list[float]:
        asked = {
            "model": self.model,
            "prompt": list(tokens),
            "max_tokens": 1,  # 0 is refused by some versions
            "prompt_logprobs": 1,  # the likeliest token, and the one that stands there
            "add_special_tokens": False,
        }

        def read(answer: Any) -> list[float]:
            return read_prompt_logprobs(answer["choices"][0]["prompt_logprobs"], tokens)

        return self._ask("/v1/completions", asked, read)

    def _ask(self, path: str, body: dict[str, Any] | None, read: Callable[[Any], T]) -> T:
        """What `read` makes of the answer; faults that may pass are given time to."""
        fault = ""
        for attempt in range(self._num_retries + 1):
            if attempt:
                time.sleep(min(FIRST_WAIT_S * 2 ** (attempt - 1), LONGEST_WAIT_S))
            try:
                answer = self._send(path, body)
            except urllib.error.HTTPError as error:
                fault = f"it answered {error.code} {_reason(error)}"
                if error.code < 500 and error.code not in (408, 429):
                    break
            except TimeoutError:
                fault = f"no answer within distillation.request_timeout_s = {self._timeout_s:g}"
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", None) or error
                is_late = isinstance(reason, TimeoutError)
                fault = (
                    f"no answer within distillation.request_timeout_s = {self._timeout_s:g}" if is_late else f"{reason}"
                )
            else:
                return self._read(path, answer, read)
        tries = f"{attempt + 1} {'try' if attempt == 0 else 'tries'}"
        raise UserError(
            f"{self!r} must answer as a vLLM server; {path} failed after {tries}: {fault}. Look at the server and the address; "
            "for one that is only busy raise distillation.num_retries or distillation.request_timeout_s, and go on with "
            "--resume."
        )

    def _send(self, path: str, body: dict[str, Any] | None) -> bytes:
        """One request. The deadline is one of the whole answer: the library's own starts anew with every packet."""
        deadline = time.monotonic() + self._timeout_s
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
        with _OPENER.open(request, timeout=self._timeout_s) as response:
            parts = []
            while part := response.read1(1 << 20):
                parts.append(part)
                if time.monotonic() > deadline:
                    raise TimeoutError
            return b"".join(parts)

    def _read(self, path: str, answer: bytes, read: Callable[[Any], T]) -> T:
        try:
            return read(json.loads(answer))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self!r} must be the address of a vLLM server; its answer to {path} is not in that protocol "
                f"({type(error).__name__}: {error}): {answer[:200]!r}."
            ) from error


def _model_of(answer: Any) -> tuple[str, int | None]:
    """Name of the model served, and how many positions it has."""
    first = answer["data"][0]
    limit = first.get("max_model_len")
    return str(first["id"]), None if limit is None else int(limit)


def _text_of(answer: Any) -> str:
    return str(answer["prompt"])


def read_prompt_logprobs(entries: Any, tokens: Sequence[int]) -> list[float]:
    """The log-probability of each token that was sent: an entry holds it, perhaps beside that of the likeliest one."""
    found = [float(entry[str(token)]["logprob"]) for entry, token in zip(entries[1:], tokens[1:], strict=True)]
    return [0.0, *(-math.inf if number <= _IMPOSSIBLE else number for number in found)][: len(tokens)]


def _reason(error: urllib.error.HTTPError) -> str:
    """What the server says of a request that it did not answer."""
    return message_in(error.read(2000).decode(errors="replace")) or str(error.reason)


def message_in(text: str) -> str:
    """The words of the body of a refusal: those of its message where it is in vLLM's form, else all of it."""
    try:
        said = json.loads(text)
        said = said.get("error", said)
        return str(said["message"] if isinstance(said, dict) else said)
    except (ValueError, KeyError, AttributeError):
        return text
