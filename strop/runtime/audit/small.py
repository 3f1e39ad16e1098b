"""The values that an audit sets in place of a config's own, so that its runs are small and need nothing of the user's.

Numbers keep the order that they stand in: what is below the run's steps stays below them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from strop.config import SFTConfig, TrainConfig
from strop.config.off_policy import AHEAD
from strop.config.tree import leaf_of, leaves, values
from strop.runtime.audit.small_parts import Values, before_the_loss, engine_servers, teachers
from strop.runtime.audit.workshop import (
    CHARACTERS,
    COLUMNS,
    DEMONSTRATION_COLUMNS,
    supplied,
    write_demonstrations,
    write_prompts,
)

NUM_STEPS = 3
LEARNING_RATES = (0.05, 0.005, 0.0005)  # so high that ratios leave 1, unless weights overflow then
# Below these, other options find nothing to act on.
ENOUGH = {
    "rollout.max_response_tokens": 6,
    "rollout.group_size": 4,
    "algorithm.updates_per_batch": 2,
}
_MOST = {
    "rollout.max_response_tokens": 6,
    "rollout.group_size": 4,
    "algorithm.updates_per_batch": 2,
    "algorithm.advantage.k": 2,
    "data.size": 24,
    "data.max_prompts": 24,
    "data.batch_size": 4,
    "run.num_epochs": 2,
}
_MOST_IN_EVALUATION = {"max_response_tokens": 6, "num_samples": 2, "size": 6, "max_prompts": 6}
_PROMPT_CHARACTERS = 8
_OF_PROCESSES = ("num_processes", "process_timeout_s", "tensor_parallel", "context_parallel")
_OF_PROCESSES += ("pipeline_parallel", "distributed_optimizer")


def made_small(config: TrainConfig | SFTConfig, folder: Path, server: str) -> Iterator[Values]:
    """Ways to make a config small, of which a user's own rules may refuse some: what does not shorten comes last. `server`:
    the address that stands for those of teachers."""
    fixed = _fixed(config, folder)
    if isinstance(config, TrainConfig):
        now = values(config)
        fixed |= teachers(now, folder, server) | before_the_loss(now, fixed, folder) | engine_servers(now, folder)
    for total in (NUM_STEPS, 6, 8, 12):
        yield fixed | _steps(config, fixed, total)


def _fixed(config: TrainConfig | SFTConfig, folder: Path) -> Values:
    now = values(config)
    changed = {path: min(now[path], most) for path, most in _MOST.items() if now.get(path) is not None}
    if "algorithm.updates_per_batch" in changed:
        updates = changed["algorithm.updates_per_batch"]
        # An update of one sequence has one average, whatever is asked.
        prompts = 4 if now["rollout.group_size"] > 1 else 4 * updates
        changed["rollout.prompts_per_step"] = updates * -(-prompts // updates)
        changed["guards.max_logprob_gap"] = float("inf")
        changed["rollout.from_folder"] = None
    if isinstance(config, TrainConfig) and config.has_critic:
        changed["critic.lr"] = LEARNING_RATES[0]
    changed |= {"model.path": str(folder / "model"), "run.folder": str(folder / "run")}
    changed["trainer.num_threads"] = 1  # of a model this small more threads only wait for one another
    alone = dict(type(config.trainer)())
    changed |= {f"trainer.{name}": alone[name] for name in _OF_PROCESSES if name in alone}
    changed |= {path: 0 for path in ("engine.num_replicas", "rollout.num_scorers") if now.get(path)}  # of a cluster
    if now.get(AHEAD):  # by whole batches: what streams depends on the clock, and no two runs could be compared
        updates = changed.get("algorithm.updates_per_batch", 1)
        changed |= {AHEAD: max(updates, ENOUGH["algorithm.updates_per_batch"])}
        changed |= {"rollout.streaming": False, "rollout.mask_older_tokens": False}
    if now["model.device"] != "auto":
        changed["model.device"] = "cpu"
    for path, value in now.items():
        name = path.rpartition(".")[2]
        if path.startswith("eval.") and name in _MOST_IN_EVALUATION and value is not None:
            changed[path] = min(value, _MOST_IN_EVALUATION[name])
        elif path == "eval.best" and "@" in (value or ""):
            metric, _, k = value.partition("@")
            changed[path] = f"{metric}@{min(int(k), _MOST_IN_EVALUATION['num_samples'])}"
        elif name == "stop_token_ids":  # ids of the user's vocabulary, as ids of this one
            changed[path] = tuple(dict.fromkeys(2 + token % len(CHARACTERS) for token in value))
        elif name == "system_prompt" and value is not None:
            changed[path] = value[:_PROMPT_CHARACTERS]
        elif value is not None and (name in ("function", "reward_key", "name", "options") or path == "critic.path"):
            given = supplied(path, now, folder)
            changed |= {path: given[0]} if given else {}
    return changed | {f"{table}.path": write_data(now, table, folder) for table in data_tables(now)}


def data_tables(now: Values) -> list[str]:
    """The tables that name a file of prompts or demonstrations."""
    return [path.removesuffix(".path") for path in now if path.endswith("data.path")]


def write_data(now: Values, table: str, folder: Path, *, broken: bool = False, name: str = "") -> str:
    """The files of a table, with the columns that the config names; returns the first one's path."""
    ending = "parquet" if now.get(f"{table}.kind") == "parquet" else "jsonl"
    name = name or ("broken" if broken else "")
    path = folder / f"{table}{'-' if name else ''}{name}.{ending}"
    files = [path] if name else [path, folder / f"{table}-other.{ending}"]
    for file in files:
        if f"{table}.response_key" in now:
            columns = {key: now[f"{table}.{key}"] for key in DEMONSTRATION_COLUMNS}
            write_demonstrations(file, columns, broken=broken, as_messages=name == "conversations")
        else:
            columns = {key: now[f"{table}.{key}"] for key in COLUMNS}
            write_prompts(file, columns, num_rows=6 if table.startswith("eval") else 24, broken=broken)
    return str(path)


def is_of_reward(path: str) -> bool:
    """Does an option say how answers are scored, of the run or of a set of held-out prompts?"""
    return ".reward." in f".{path}."


def with_varied_rewards(given: Values, now: Values, folder: Path) -> Values:
    """The same with a scorer under which samples of one prompt earn different rewards, whatever they say; it is called in this
    process, since starting another takes as long as such a run."""
    kept = {path: value for path, value in given.items() if not is_of_reward(path)}
    (first, *_) = supplied(
        "reward.function", now | {"reward.kind": "function", "reward.per": "response", "reward.weights": {}}, folder
    )
    return kept | {"reward.kind": "function", "reward.function": first, "reward.num_workers": 0}


def _steps(config: TrainConfig | SFTConfig, fixed: Values, total: int) -> Values:
    """Whatever was set and counts steps, which its name says, shortened; schedules count optimizer steps."""
    if config.run.num_steps is None:  # of strop sft, as many as there are demonstrations for
        names = {path for path, value in values(config).items() if path.endswith("_steps") and value}
        return {path: 2 for path in names & set(config.origins)}
    if config.run.num_steps <= total:
        return {}
    found: Values = {"run.num_steps": total}
    updates = fixed.get("algorithm.updates_per_batch", 1)
    now = values(config)
    names = {leaf.path for leaf in leaves(type(config)) if leaf.name.endswith("_steps")}
    for path in config.origins:
        if path in names - {"run.num_steps", AHEAD} and isinstance(now.get(path), int) and now[path] > 0:
            is_optimizer = path.startswith("trainer.") or leaf_of(config, path).name == "warmup_steps"
            own, small = config.run.num_steps, total
            if is_optimizer and isinstance(config, TrainConfig):
                own, small = config.num_critic_steps, total * updates
            found[path] = _rank(now[path], own, small)
    if found.get("critic.only_first_steps"):  # one before all others, which are as many as without
        found |= {"critic.only_first_steps": 1, "run.num_steps": total + 1}
    return found


def _rank(value: int, total: int, small: int) -> int:
    """A number that stands to `small` as `value` to `total`: below, equal or above; 1 only for 1.

    >>> [_rank(value, 100, 4) for value in (1, 2, 10, 99, 100, 1000)]
    [1, 2, 2, 3, 4, 5]
    """
    if value >= total:
        return small + (value > total)
    return min(value, max(2, round(value * small / total)), small - 1)
