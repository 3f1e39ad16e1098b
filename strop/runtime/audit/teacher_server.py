"""A small server that answers as a teacher's vLLM server does, with the numbers of a model of the workshop."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

Answer = Callable[[str, Any], Any]  # path and body of a request to the body of its answer
MAX_MODEL_LEN = 8192


class Refused(Exception):
    """An answer with another status than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Dropped(Exception):
    """The connection ends without an answer."""


class TeacherModel:
    """A model folder behind the three paths that strop asks."""

    def __init__(self, folder: Path) -> None:
        self._name = folder.name
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._one_at_a_time = threading.Lock()

    def __call__(self, path: str, body: Any) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": self._name, "max_model_len": MAX_MODEL_LEN}]}
        if path == "/detokenize":
            return {"prompt": self._tokenizer.decode(body["tokens"])}
        if path == "/v1/completions":
            with self._one_at_a_time:
                return {"choices": [{"text": "", "prompt_logprobs": self._prompt_logprobs(body["prompt"])}]}
        raise Refused(404, "Not Found")

    @torch.no_grad()
    def _prompt_logprobs(self, tokens: list[int]) -> list[dict[str, Any] | None]:
        """Of each token but the first an entry for it, and one for the likeliest, by ids that JSON has made text."""
        logprobs = self._model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        found: list[dict[str, Any] | None] = [None]
        for token, row in zip(tokens[1:], logprobs[:-1], strict=True):
            found.append({str(i): {"logprob": float(row[i]), "rank": 1} for i in {int(row.argmax()), token}})
        return found


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # all of a batch ask at once; the 5 of the library would reset connections


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """The address of a server on this machine that answers so, for as long as this lasts."""

    class Handler(BaseHTTPRequestHandler):
        def _respond(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            try:
                status, found = 200, answer(self.path, json.loads(self.rfile.read(length)) if length else None)
            except Dropped:
                self.close_connection = True
                return
            except Refused as error:
                status, found = error.status, {"error": {"message": str(error)}}
            sent = json.dumps(found).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)
            except OSError:
                pass  # whoever asked has gone

        do_GET = do_POST = _respond

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = _Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
