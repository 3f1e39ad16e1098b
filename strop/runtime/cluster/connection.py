"""A connection to a Ray cluster, and room in it for the actors of a run."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from strop.config import TorchEngineOptions, TrainConfig
from strop.types import ConfigError, UserError, WaitError

LOCAL = "local"
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # of an actor that was given none: Ray may leave it those of the machine
_LAST_LINES_S = 1.0  # for what actors printed last to come here: Ray looks at their logs now and then
HOW = "local, auto (inside of a Ray job, or on a machine of a cluster), HOST:6379 or ray://HOST:10001"
Bundle = dict[str, float]  # CPU and GPU of one actor


def load_ray() -> Any:
    """The package, with logs of actors as this project wants them.

    Raises:
        UserError: it is not installed.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # a line that two ranks print is two lines
    os.environ.setdefault("RAY_COLOR_PREFIX", "1" if sys.stdout.isatty() else "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the default to be, which it otherwise announces
    try:
        import ray
    except ImportError as error:
        raise UserError(f"--cluster must have Ray: pip install 'strop[ray]' ({error}).") from error
    return ray


@contextmanager
def connected(address: str, *, num_cpus: int) -> Iterator[Any]:
    """Ray, connected for as long as this lasts. A connection that is there already is used, and stays.

    Args:
        address: what --cluster says.
        num_cpus: that the actors of the run ask for; a cluster that is started here has no fewer.

    Raises:
        UserError: there is no cluster at the address.
    """
    ray = load_ray()
    if ray.is_initialized():
        yield ray
        time.sleep(_LAST_LINES_S)
        return
    here = {"num_cpus": max(num_cpus, os.cpu_count() or 1), "include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=True, **here)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--cluster must be {HOW}, got {address!r}: {reason:.300}") from error
    try:
        yield ray
        time.sleep(_LAST_LINES_S)
    finally:
        ray.shutdown()


@contextmanager
def placed(ray: Any, bundles: Sequence[Bundle], *, timeout_s: float) -> Iterator[Any]:
    """Room for the actors of a run, close together: a placement group of these bundles.

    Raises:
        WaitError: the cluster has no such room within the time.
    """
    group = ray.util.placement_group(list(bundles), strategy="PACK")
    try:
        try:
            ray.get(group.ready(), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise WaitError(
                f"the cluster had no room for {_in_words(bundles)} within trainer.process_timeout_s = {timeout_s:g} s; "
                f"it has {_total(ray.cluster_resources())}, of which {_total(ray.available_resources())} are free."
            ) from None
        yield group
    finally:
        ray.util.remove_placement_group(group)


def _in_words(bundles: Sequence[Bundle]) -> str:
    total = {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in ("CPU", "GPU")}
    return f"{len(bundles)} actors with {_total(total)}"


def _total(resources: dict[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs"


def room_of_run() -> Any:
    """The placement group that this process is an actor of; None in a run without a cluster."""
    if "ray" not in sys.modules:
        return None
    import ray

    return ray.util.get_current_placement_group() if ray.is_initialized() else None


def check_has_room(config: TrainConfig) -> None:
    """Raises ConfigError where the config asks for actors and there is no cluster to hold them."""
    engine = config.engine
    wanted = {"engine.num_replicas": engine.num_replicas if isinstance(engine, TorchEngineOptions) else 0}
    wanted["rollout.num_scorers"] = config.rollout.num_scorers
    for option, number in wanted.items():
        if number and room_of_run() is None:
            raise ConfigError(
                f"{option} must be 0 without a cluster, got {number}: each is an actor of Ray. strop train CONFIG --cluster "
                f"ADDRESS has one; here set --{option} 0."
            )


def why_lost(error: BaseException) -> str:
    """The sentence of Ray's that says why an actor died."""
    lines = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
    found = next((line for line in lines if line.startswith("The actor is dead because")), lines[0])
    return found.partition(" Some common causes")[0].rstrip(".")
