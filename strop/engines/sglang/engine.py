"""The engine `sglang`: samples in one or several SGLang servers, which are given the trainer's weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from strop.config import SGLangEngineOptions
from strop.engines.served.engine import ServedEngine
from strop.engines.served.fleet import Fleet, Router, StartServer
from strop.engines.served.process import Served
from strop.engines.sglang.group_transfer import transfer_of
from strop.engines.sglang.process import ServerProcess, flags_of, server_command
from strop.engines.sglang.server import SGLangServer


class SGLangEngine(ServedEngine):
    """Samples in SGLang servers; see `ServedEngine`."""

    process = ServerProcess

    def _make_fleet(
        self, options: SGLangEngineOptions, served: Served, *, tell: Callable[[str], None], start: StartServer
    ) -> Fleet:
        kind, args = partial(SGLangServer, flags=flags_of(options)), server_command(served, options)
        router = None if options.router is None else Router(options.router, SGLangServer.workers)  # type: ignore[arg-type]
        return Fleet(options, kind, transfer_of(options), args, tell=tell, start=start, router=router)
