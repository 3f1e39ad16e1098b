"""What filters, penalties, budgets, teachers and engines need in a small run, where a config has them at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strop.config import is_address
from strop.runtime.audit.engine_servers import PYTHONS, addresses, routers
from strop.runtime.audit.workshop import TEACHERS, sources_of

Values = dict[str, Any]  # path of an option to its value


def before_the_loss(now: Values, small: Values, folder: Path) -> Values:
    """What filters, penalties and budgets need in a small run, where they are set at all."""
    limit, group_size = small["rollout.max_response_tokens"], small["rollout.group_size"]
    found: Values = {}
    for name in ("group", "rollout"):
        if now[f"filter.{name}"] is not None:
            found[f"filter.{name}"] = f"{folder}/scorer.py:keeps_{name}"
    if now["rollout.prompts_per_round"] is not None:
        found["rollout.prompts_per_round"] = 2 * small["rollout.prompts_per_step"]
    long_enough = group_size * (4096 + len(now["data.system_prompt"] or "") + limit)
    if now["rollout.max_tokens_in_flight"] is not None:
        found["rollout.max_tokens_in_flight"] = max(now["rollout.max_tokens_in_flight"], long_enough)
    if now.get("engine.max_cache_tokens") is not None:
        found["engine.max_cache_tokens"] = max(now["engine.max_cache_tokens"], long_enough)
    if now.get("length_penalty.buffer_tokens") is not None:
        found["length_penalty.buffer_tokens"] = min(now["length_penalty.buffer_tokens"], limit)
    if "length_penalty.target_tokens" in now:
        found["length_penalty.target_tokens"] = min(now["length_penalty.target_tokens"], limit - 1)
    if now["data.source_weights"] and "data.path" in now:
        found["data.source_weights"] = {"even": 1.0, "odd": 2.0}
    return found


def teachers(now: Values, folder: Path, server: str) -> Values:
    """Teachers of the workshop for those of the config, and its sources for the config's."""
    found: Values = {}
    one, other = (str(folder / name) for name in TEACHERS)
    if now["distillation.teacher"] is not None:
        found["distillation.teacher"] = server if is_address(now["distillation.teacher"]) else one
    places = [server if is_address(place) else other for place in now["distillation.teachers"].values()]
    if places:
        found["distillation.teachers"] = dict(zip(sources_of(now), [*places, one], strict=False))
    return found


def engine_servers(now: Values, folder: Path) -> Values:
    """Servers that stand for those of the config, or a program that does for those that strop starts; short waits."""
    if now["engine.kind"] in ("torch", "vllm_in_process"):
        return {}
    found: Values = {"engine.start_timeout_s": 20.0, "engine.request_timeout_s": 30.0, "engine.transfer": "files"}
    if now.get("engine.transfer_folder") is not None:
        found["engine.transfer_folder"] = str(folder / "weights")
    if now.get("engine.addresses"):
        return found | {"engine.addresses": addresses()[: len(now["engine.addresses"])]}
    if now.get("engine.router") is not None:
        return found | {"engine.router": routers()[0]}
    few = min(now.get("engine.num_servers", 1), 2)
    return found | {"engine.python": str(folder / PYTHONS[0]), "engine.num_servers": few}
