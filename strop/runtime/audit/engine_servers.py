"""What stands for an engine's servers while a config is audited: two of them, each in the words of every kind, routers before
them, and a program that is started in place of a server and hands what it is asked to one of them. Beside them, what stands for
vLLM in strop's own process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from strop.runtime.audit import sglang_server, vllm_core, vllm_server
from strop.runtime.audit.stand_in import Spoil, StandIn
from strop.runtime.audit.teacher_server import Dropped, serving

PYTHONS = ("servers-python", "other-servers-python")  # in the workshop's folder, after `standing` was entered

# Started as Python is for a server; it ends when its standard input does.
_PROXY = """
import http.client, http.server, json, os, sys, threading

name, targets, given = sys.argv[1], sys.argv[2].split(","), sys.argv[4:]
host, port = given[given.index("--host") + 1], int(given[given.index("--port") + 1])

def ask(method, path, body):
    connection = http.client.HTTPConnection(targets[0])
    connection.request(method, path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read()

class Handler(http.server.BaseHTTPRequestHandler):
    def respond(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            status, found = ask(self.command, self.path, body)
        except (OSError, http.client.HTTPException):
            return  # the connection ends without an answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(found)))
        self.end_headers()
        self.wfile.write(found)

    do_GET = do_POST = respond

    def log_message(self, *given):
        pass

class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

def end():
    sys.stdin.buffer.read()
    os._exit(0)

threading.Thread(target=end, daemon=True).start()
server = Server((host, port), Handler)
status, place = ask("POST", "/audit_started", json.dumps(" ".join([name, *(word for word in given if word != str(port))])))
targets = targets[int(place) % len(targets):]
server.serve_forever()
"""


class _EveryKind:
    """A server in the words of every kind: a run asks in those of one."""

    def __init__(self, folder: Path) -> None:
        self._sglang = sglang_server.StandIn(folder)
        self._kinds: tuple[StandIn, ...] = (self._sglang, vllm_server.StandIn(folder))

    def __call__(self, path: str, body: Any) -> Any:
        if path == "/audit_started":
            for stand_in in _STANDING.values():
                stand_in._sglang.was_started_as(body)
        return next((kind for kind in self._kinds if kind.knows(path)), self._sglang)(path, body)

    @property
    def seen(self) -> dict[str, int]:
        return {name: count for kind in self._kinds for name, count in kind.seen.items()}

    def begin(self, spoil: Spoil | None) -> None:
        for kind in self._kinds:
            kind.begin(spoil)


_STANDING: dict[str, _EveryKind] = {}  # by address, while an audit lasts
_ROUTERS: dict[str, sglang_server.RouterStandIn] = {}  # before them


@contextmanager
def standing(folder: Path) -> Iterator[None]:
    """Servers with the workshop's model, for as long as this lasts."""
    with ExitStack() as servers:
        servers.enter_context(vllm_core.in_place_of_vllm())
        for _ in range(2):
            stand_in = _EveryKind(folder / "model")
            _STANDING[servers.enter_context(serving(stand_in))] = stand_in
            router = sglang_server.RouterStandIn(_STANDING)
            _ROUTERS[servers.enter_context(serving(router))] = router
        targets = ",".join(address.removeprefix("http://") for address in _STANDING)
        (folder / "proxy.py").write_text(_PROXY)
        for name in PYTHONS:
            path = folder / name
            path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{folder}/proxy.py" {name} {targets} "$@"\n')
            path.chmod(0o755)
        try:
            yield
        finally:
            begin()  # whoever hangs goes on
            _STANDING.clear()
            _ROUTERS.clear()


def addresses() -> tuple[str, ...]:
    return tuple(_STANDING)


def routers() -> tuple[str, ...]:
    return tuple(_ROUTERS)


def begin(spoil: Callable[[], Spoil] | None = None) -> None:
    """Have the servers be as they were in the beginning, each with a fault of its own where one is asked for."""
    for stand_in in _STANDING.values():
        stand_in.begin(None if spoil is None else spoil())
    for router in _ROUTERS.values():
        router.num_routed = 0
    vllm_core.CoreStandIn.did.clear()


def seen() -> list[dict[str, int]]:
    """What each server was asked to do since it began, and a router, where one was."""
    routed = {f"routed by {n}": router.num_routed for n, router in enumerate(_ROUTERS.values()) if router.num_routed}
    here = dict(vllm_core.CoreStandIn.did)
    return [*(dict(stand_in.seen) for stand_in in _STANDING.values()), *(found for found in (routed, here) if found)]


def lost_once() -> Spoil:
    """The third sample that is asked for is not answered."""
    count = 0
    guard = threading.Lock()

    def spoil(path: str, body: Any, answer: Callable[[], Any]) -> Any:
        nonlocal count
        if path.endswith("/generate"):
            with guard:
                count += 1
                if count == 3:
                    raise Dropped
        return answer()

    return spoil


def absent() -> Spoil:
    """Nobody answers."""

    def spoil(path: str, body: Any, answer: Callable[[], Any]) -> Any:
        raise Dropped

    return spoil


def hanging(limit_s: float = 5.0) -> Spoil:
    """Samples are asked for, and never come."""
    over = threading.Event()

    def spoil(path: str, body: Any, answer: Callable[[], Any]) -> Any:
        if path.endswith("/generate"):
            over.wait(limit_s)
            raise Dropped
        return answer()

    return spoil
