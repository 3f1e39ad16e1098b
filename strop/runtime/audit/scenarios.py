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
_MAX_SAMPLES = 4  # of an evaluation, to each prompt
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


def _broken_line_of_sets(now: Values, folder: Path) -> Values:
    tables = [
        path.removesuffix(".kind") for path in now if path.startswith("eval.sets.") and path.endswith(".data.kind")
    ]
    return {path: value for table in tables for path, value in _broken_line(table)(now, folder).items()}


def _failing_scorer(now: Values, folder: Path) -> Values:
    names = {"function": "failing", "slime": "slime_failing"}
    kinds = {path.removesuffix(".kind"): kind for path, kind in now.items() if path.endswith("reward.kind")}
    return {f"{table}.function": f"{folder}/scorer.py:{names[kind]}" for table, kind in kinds.items() if kind in names}


def _nothing_kept(now: Values, folder: Path) -> Values:
    return {"filter.rollout": f"{folder}/scorer.py:keeps_nothing"} if _filters(now) else {}


def _filters(now: Values) -> bool:
    return bool(now["filter.equal_rewards"] or now["filter.group"] or now["filter.rollout"])


def _few_prompts(now: Values, folder: Path) -> Values:
    return {"data.max_prompts": 6} if now["curriculum.kind"] != "none" else {}


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
    Scenario("a broken line in eval.sets", _broken_line_of_sets),
    Scenario("a run in the folder already", _used_folder),
    Scenario("a filter that keeps nothing", _nothing_kept),
    Scenario("a few prompts, seen again and again", _few_prompts),
)


def made_small(config: TrainConfig, folder: Path, *, server: str) -> Values:
    """What an audit sets in place of a config's own values, so that its runs are small and need nothing of the user's.
    `server`: the address that stands for those of teachers."""
    now = values(config)
    updates = now["algorithm.updates_per_batch"]
    prompts = (
        4 if now["rollout.group_size"] > 1 else 4 * updates
    )  # an update of one sequence has one average, whatever is asked
    changed = {
        "model.path": str(folder / "model"),
        "run.folder": str(folder / "run"),
        "trainer.lr": 0.05,
        "trainer.num_threads": 1,  # of a model this small more threads only wait for one another
        "guards.max_logprob_gap": float("inf"),
        "rollout.prompts_per_step": updates * -(-prompts // updates),
        "rollout.group_size": min(now["rollout.group_size"], max(6, now.get("algorithm.advantage.k", 0) + 2)),
        "rollout.max_response_tokens": min(now["rollout.max_response_tokens"], 8),
        **_steps(config, now),
        **_teachers(now, folder, server),
    }
    changed |= _before_the_loss(now, changed, folder)
    for table in (path.removesuffix(".kind") for path in now if path.endswith("data.kind")):
        if now.get(f"{table}.kind") in ("jsonl", "parquet"):
            changed[f"{table}.path"] = str(_prompts(now, table, folder))
        elif f"{table}.size" in now:
            changed[f"{table}.size"] = min(now[f"{table}.size"], 24)
    if now["reward.kind"] in ("function", "slime"):
        changed |= _own_scorer(now, folder, "reward")
    return changed | _small_evaluation(now, folder)


def _small_evaluation(now: Values, folder: Path) -> Values:
    """Short and few answers, and rewards of the sets' own that need nothing of the user's."""
    found: Values = {}
    for path, value in now.items():
        if path.startswith("eval.") and path.endswith("max_response_tokens") and value is not None:
            found[path] = min(value, 8)
        elif path.startswith("eval.") and path.endswith("num_samples") and value is not None:
            found[path] = min(value, _MAX_SAMPLES)
        elif path == "eval.best" and "@" in (value or ""):
            name, _, k = value.partition("@")
            found[path] = f"{name}@{min(int(k), _MAX_SAMPLES)}"
        elif path.startswith("eval.sets.") and path.endswith(".reward.function"):
            found |= _own_scorer(now, folder, path.removesuffix(".function"))
    return found


def _before_the_loss(now: Values, small: Values, folder: Path) -> Values:
    """What filters, penalties and budgets need in a small run, where they are set at all."""
    limit, group_size = small["rollout.max_response_tokens"], small["rollout.group_size"]
    found: Values = {}
    for name in ("group", "rollout"):
        if now[f"filter.{name}"] is not None:
            found[f"filter.{name}"] = f"{folder}/scorer.py:keeps_{name}"
    if now["rollout.prompts_per_round"] is not None:
        found["rollout.prompts_per_round"] = 2 * small["rollout.prompts_per_step"]
    if now["rollout.max_tokens_in_flight"] is not None:
        long_enough = group_size * (4096 + len(now["data.system_prompt"] or "") + limit)
        found["rollout.max_tokens_in_flight"] = max(now["rollout.max_tokens_in_flight"], long_enough)
    if now.get("length_penalty.buffer_tokens") is not None:
        found["length_penalty.buffer_tokens"] = min(now["length_penalty.buffer_tokens"], limit)
    if "length_penalty.target_tokens" in now:
        found["length_penalty.target_tokens"] = min(now["length_penalty.target_tokens"], limit - 1)
    if now["data.source_weights"] and "data.path" in now:
        found["data.source_weights"] = {"even": 1.0, "odd": 2.0}
    return found


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


def _own_scorer(now: Values, folder: Path, table: str) -> Values:
    """A function that returns what the options of a table's own take: named rewards, numbers per token or turn."""
    kind, weights, per = (now[f"{table}.{name}"] for name in ("kind", "weights", "per"))
    is_named = weights or (now["algorithm.advantage.kind"] == "gdpo" and kind == "function" and table == "reward")
    before, after = "slime_" if kind == "slime" else "", "" if per == "response" else f"_{per}"
    names = {f"{table}.weights": {"one": 1.0, "two": 0.5}} if weights else {}
    return {f"{table}.function": f"{folder}/scorer.py:{before}{'named' if is_named else 'score'}{after}", **names}


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
    write_prompts(path, columns, num_rows=6 if table.startswith("eval.") else 24, broken=broken)
    return path
