"""vLLM servers on the nodes of a cluster: rank 0's side of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from strop.config import TrainConfig, VLLMEngineOptions
from strop.engines.vllm.process import EndedError
from strop.engines.vllm.server import LostError
from strop.runtime.cluster.connection import why_lost
from strop.runtime.cluster.server_actor import ServerActor
from strop.types import ConfigError, UserError


class ServersOnNodes:
    """Starts servers in the last bundles of a run's placement group; called as `ServerProcess` is.

    Args:
        config: of the run, with engine.kind = vllm.
        room: its placement group.
    """

    def __init__(self, config: TrainConfig, room: Any) -> None:
        self._config, self._room, self._num_started = config, room, 0

    def __call__(self, python: str, args: Sequence[str], log: Path) -> ServerOnNode:
        number = self._num_started
        self._num_started += 1
        return ServerOnNode(self._config, self._room, number, python, args)


class ServerOnNode:
    """A server in an actor, as `ServerProcess` is one of this machine. Where the actor is lost with its node it is started
    again wherever Ray finds room, and the address is another one.

    Raises:
        ConfigError: it is on another node than rank 0, and nothing says where files of weights may lie.
    """

    def __init__(self, config: TrainConfig, room: Any, number: int, python: str, args: Sequence[str]) -> None:
        self._config, self._room, self._number, self._given = config, room, number, (python, list(args))
        self._limit_s = config.trainer.process_timeout_s
        self._make()

    @property
    def log(self) -> str:
        return f"below, after (server {self._number})"

    def start(self) -> None:
        """Start it. One that runs still is ended first; an actor that is lost is replaced.

        Raises:
            UserError: there is no such executable on its node.
        """
        from ray.exceptions import RayActorError

        try:
            self._asked("start")
        except RayActorError:
            self._make()
            self._asked("start")

    def check(self) -> None:
        """Raises EndedError once it has ended by itself, and LostError once its actor is lost."""
        from ray.exceptions import RayActorError

        try:
            ended = self._asked("check")
        except RayActorError as error:
            raise LostError(why_lost(error)) from error
        if ended is not None:
            raise EndedError(*ended)

    def last_lines(self) -> str:
        """The end of what it printed; "" where its actor is lost."""
        from ray.exceptions import RayActorError

        try:
            return self._asked("last_lines")
        except RayActorError:
            return ""

    def stop(self) -> None:
        """End it and its actor."""
        import ray
        from ray.exceptions import RayError

        with suppress(RayError):
            self._asked("stop")
        ray.kill(self._actor)

    def _asked(self, method: str) -> Any:
        import ray
        from ray.exceptions import RayTaskError

        try:
            return ray.get(getattr(self._actor, method).remote(), timeout=self._limit_s)
        except RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            raise

    def _make(self) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as In

        options = self._config.engine
        assert isinstance(options, VLLMEngineOptions)
        index = self._number + (0 if options.sleep else self._config.trainer.num_processes)
        bundle = self._room.bundle_specs[index]
        kind = ray.remote(ServerActor).options(
            num_cpus=0 if options.sleep else bundle["CPU"],
            num_gpus=bundle.get("GPU", 0) / (2 if options.sleep else 1),
            scheduling_strategy=In(self._room, placement_group_bundle_index=index),
        )
        self._actor = kind.remote(self._number, *self._given, os.getcwd())
        self.address = str(self._asked("address"))
        host, here = urlsplit(self.address).hostname, ray.util.get_node_ip_address()
        if options.transfer == "files" and options.transfer_folder is None and host != here:
            raise ConfigError(
                f"engine.transfer_folder must be a folder that all nodes see, got none: server {self._number} is at {host}, "
                f"and rank 0 at {here}."
            )
