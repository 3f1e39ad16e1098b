"""The engine `vllm`: samples in one or several vLLM servers, which are given the trainer's weights."""

from __future__ import annotations

from collections.abc import Callable

from strop.config import VLLMEngineOptions
from strop.engines.served.engine import ServedEngine
from strop.engines.served.fleet import Fleet, StartServer
from strop.engines.served.process import Served
from strop.engines.vllm.device_transfer import transfer_of
from strop.engines.vllm.process import ServerProcess, server_command
from strop.engines.vllm.server import VLLMServer


class VLLMEngine(ServedEngine):
    """Samples in vLLM servers; see `ServedEngine`."""

    process = ServerProcess

    def _make_fleet(
        self, options: VLLMEngineOptions, served: Served, *, tell: Callable[[str], None], start: StartServer
    ) -> Fleet:
        transfer = transfer_of(options)
        args = [*server_command(served, backend=transfer.backend), *options.server_args]
        args += ["--enable-sleep-mode"] if options.sleep else []
        return Fleet(options, VLLMServer, transfer, args, tell=tell, start=start)
