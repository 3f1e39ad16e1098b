"""The small runs in which an option can show that it acts: an ordinary one, and those in which something goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.config import TrainConfig, is_address
from strop.config.tree import leaves, values
from strop.runtime.audit.probe import Outcome, probe, probe_scorer
from strop.runtime.audit.workshop import COLUMNS, SOURCES, TEACHERS, write_prompts

NUM_STEPS = 4
Values = dict[str, Any]  # path of an option to its value


@dataclass(frozen=True)
class Scenario:
    """What is different in it, the options it sets on top, and what is run; `name` is empty for the ordinary one."""

    name: str
    overrides: Callable[[Values, Path], Values]
    run: Callable[[TrainConfig], Outcome] = probe


def _as_it_is(now: Values, folder: Path) -> Values:
    return {}


def _broken_line(table: str) -> Callable[[Values, Path], Values]:
    def overrides(now: Values, folder: Path) -> Values:
        if now.get(f"{table}.kind") != "jsonl":
            return {}
        return {f"{table}.path": str(_prompts(now, table, folder, broken=True))}

    return overrides


def _failing_scorer(now: Values, folder: Path) -> Values:
    names = {"function": "failing", "slime": "slime_failing"}
    kind = now["reward.kind"]
    return {"reward.function": f"{folder}/scorer.py:{names[kind]}"} if kind in names else {}


def _used_folder(now: Values, folder: Path) -> Values:
    (folder / "run").mkdir(exist_ok=True)
    (folder / "run/metrics.jsonl").write_text("")
    return {}


def _out_of_reach(now: Values, folder: Path) -> Values:
    return {path: 1e9 for path, value in now.items() if path.endswith("target") and value is not None}


def _silent_teacher(now: Values, folder: Path) -> Values:
    """The address of a teacher becomes a port that nobody listens at."""
    is_remote = is_address(now["distillation.teacher"] or "")
    return {"distillation.teacher": "http://127.0.0.1:1"} if is_remote else {}


SCENARIOS = (
    Scenario("", _as_it_is),
    Scenario("targets that are never reached", _out_of_reach),
    Scenario("a teacher's server that is not there", _silent_teacher),
    Scenario("made-up answers", _as_it_is, probe_scorer),
    Scenario("a scorer that fails", _failing_scorer, probe_scorer),
    Scenario("a broken line in data", _broken_line("data")),
    Scenario("a broken line in eval.data", _broken_line("eval.data")),
    Scenario("a run in the folder already", _used_folder),
)


def made_small(config: TrainConfig, folder: Path, *, server: str) -> Values:
    """What an audit sets in place of a config's own values, so that its runs are small and need nothing of the user's.
    `server`: the address that stands for those of teachers."""
    now = values(config)
    updates = now["algorithm.updates_per_batch"]
    changed = {
        "model.path": str(folder / "model"),
        "run.folder": str(folder / "run"),
        "trainer.lr": 0.05,
        "trainer.num_threads": 1,  # of a model this small more threads only wait for one another
        "guards.max_logprob_gap": float("inf"),
        "rollout.prompts_per_step": updates * -(-4 // updates),
        "rollout.group_size": min(now["rollout.group_size"], max(6, now.get("algorithm.advantage.k", 0) + 2)),
        "rollout.max_response_tokens": min(now["rollout.max_response_tokens"], 8),
        **_steps(config, now),
        **_teachers(now, folder, server),
    }
    for table in ("data", "eval.data"):
        if now.get(f"{table}.kind") in ("jsonl", "parquet"):
            changed[f"{table}.path"] = str(_prompts(now, table, folder))
        elif f"{table}.size" in now:
            changed[f"{table}.size"] = min(now[f"{table}.size"], 24)
    if now["reward.kind"] == "function":
        changed["reward.function"] = _scorer(now, folder)
    elif now["reward.kind"] == "slime":
        changed["reward.function"] = f"{folder}/scorer.py:slime"
    if now["eval.max_response_tokens"] is not None:
        changed["eval.max_response_tokens"] = min(now["eval.max_response_tokens"], 8)
    return changed


def _teachers(now: Values, folder: Path, server: str) -> Values:
    """Teachers of the workshop for those of the config, and its sources for the config's."""
    found: Values = {}
    one, other = (str(folder / name) for name in TEACHERS)
    if now["distillation.teacher"] is not None:
        found["distillation.teacher"] = server if is_address(now["distillation.teacher"]) else one
    places = [server if is_address(place) else other for place in now["distillation.teachers"].values()]
    if places:
        found["distillation.teachers"] = dict(zip(SOURCES, [*places, one], strict=False))
    return found


def with_varied_rewards(given: Values, now: Values, folder: Path) -> Values:
    """The same with a scorer under which samples of one prompt earn different rewards, whatever they say."""
    kept = {path: value for path, value in given.items() if not path.startswith("reward.")}
    return kept | {"reward.kind": "function", "reward.function": _scorer(now, folder)}


def _scorer(now: Values, folder: Path) -> str:
    return f"{folder}/scorer.py:{'named' if now['algorithm.advantage.kind'] == 'gdpo' else 'score'}"


def _steps(config: TrainConfig, now: Values) -> Values:
    """Whatever was set and counts steps, which its name says, shortened in proportion."""
    total = config.run.num_steps
    if total <= NUM_STEPS:
        return {}
    names = {leaf.path for leaf in leaves(type(config)) if leaf.name.endswith("_steps")}
    found = {path: now[path] for path in ("run.num_steps", *config.origins) if path in names and now[path]}
    return {path: max(1, value * NUM_STEPS // total) for path, value in found.items()}


def _prompts(now: Values, table: str, folder: Path, *, broken: bool = False) -> Path:
    ending = "parquet" if now[f"{table}.kind"] == "parquet" else "jsonl"
    path = folder / f"{table}{'-broken' if broken else ''}.{ending}"
    columns = {name: now[f"{table}.{name}"] for name in COLUMNS}
    write_prompts(path, columns, num_rows=6 if table == "eval.data" else 24, broken=broken)
    return path
