"""A vLLM server of a cluster as an actor: the actor starts it on its node, watches it, and it ends with the actor."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from strop.engines.vllm.process import EndedError, ServerProcess

_LOOK_S = 0.5  # between two looks at a server's log


class ServerActor:
    """Holds one server. What it prints, the actor prints: Ray brings it to where the run is watched.

    Args:
        number: of the server.
        python: executable of the environment that has vLLM.
        args: of the server.
        folder: to work in, where there is such a folder.
    """

    def __init__(self, number: int, python: str, args: Sequence[str], folder: str) -> None:
        import ray

        self._number = number
        if Path(folder).is_dir():
            os.chdir(folder)
        self._log = Path(tempfile.mkdtemp(prefix="strop-vllm-")) / "server.log"
        self._log.touch()
        self._process = ServerProcess(python, args, self._log, host=ray.util.get_node_ip_address())
        threading.Thread(target=self._pass_on, daemon=True, name="passes on a log").start()

    def __repr__(self) -> str:
        return f"server {self._number}"

    def _pass_on(self) -> None:
        with self._log.open(encoding="utf-8", errors="replace") as log:
            while True:
                text = log.read()
                if text:
                    sys.stdout.write(text)
                    sys.stdout.flush()
                time.sleep(_LOOK_S)

    def address(self) -> str:
        return self._process.address

    def start(self) -> None:
        self._process.start()

    def check(self) -> tuple[str, str] | None:
        """How it has ended by itself and its last lines; None while it runs."""
        try:
            self._process.check()
        except EndedError as error:
            return error.args
        return None

    def last_lines(self) -> str:
        return self._process.last_lines()

    def stop(self) -> None:
        self._process.stop()
        self._log.unlink(missing_ok=True)
        self._log.parent.rmdir()
