"""The small runs in which an option can show that it acts: an ordinary one, and those in which something goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.config import is_address
from strop.runtime.audit.outcome import Outcome
from strop.runtime.audit.probe import (
    probe,
    probe_absent_server,
    probe_broken_losses,
    probe_early_jumps,
    probe_hanging_server,
    probe_kl_jumps,
    probe_loss_jumps,
    probe_lost_server,
    probe_mixed_versions,
    probe_scorer,
    probe_sft,
)
from strop.runtime.audit.small import ENOUGH, NUM_STEPS, Values, data_tables, write_data


@dataclass(frozen=True)
class Scenario:
    """What is different in it, the options it sets on top, and what is run; `name` is empty for the ordinary one.

    `made_for`: names of options that act here if anywhere. It is one of the first for them, and tried for all others too.
    `is_larger`: the run has more steps, tokens or samples than the config asks for. An option that acts only there is idle
    in the config's own run, and alive.
    """

    name: str
    overrides: Callable[[Values, Path], Values]
    run: Callable[[Any], Outcome] = probe
    made_for: tuple[str, ...] = ()
    is_larger: bool = False


def _as_it_is(now: Values, folder: Path) -> Values:
    return {}


def _broken_line(table: str) -> Callable[[Values, Path], Values]:
    def overrides(now: Values, folder: Path) -> Values:
        if now.get(f"{table}.kind") != "jsonl":
            return {}
        return {f"{table}.path": write_data(now, table, folder, broken=True)}

    return overrides


def _broken_line_of_sets(now: Values, folder: Path) -> Values:
    tables = [
        path.removesuffix(".kind") for path in now if path.startswith("eval.sets.") and path.endswith(".data.kind")
    ]
    return {path: value for table in tables for path, value in _broken_line(table)(now, folder).items()}


def _failing_scorer(now: Values, folder: Path) -> Values:
    return _named_scorer(now, folder, {"function": "failing", "slime": "slime_failing"})


def _demanding_scorer(now: Values, folder: Path) -> Values:
    return _named_scorer(now, folder, {"function": "demanding", "slime": "slime_demanding"})


def _named_scorer(now: Values, folder: Path, names: dict[str, str]) -> Values:
    """A function of the workshop for each table of a reward, by its kind."""
    kinds = {path.removesuffix(".kind"): kind for path, kind in now.items() if path.endswith("reward.kind")}
    return {f"{table}.function": f"{folder}/scorer.py:{names[kind]}" for table, kind in kinds.items() if kind in names}


def _nothing_kept(now: Values, folder: Path) -> Values:
    return {"filter.rollout": f"{folder}/scorer.py:keeps_nothing"} if _filters(now) else {}


def _filters(now: Values) -> bool:
    return bool(now["filter.equal_rewards"] or now["filter.group"] or now["filter.rollout"])


def _few_prompts(now: Values, folder: Path) -> Values:
    return {"data.max_prompts": 6}


def _used_folder(now: Values, folder: Path) -> Values:
    used = folder / "used"
    used.mkdir(exist_ok=True)
    (used / "metrics.jsonl").write_text("")
    return {"run.folder": str(used)}


def _no_template(now: Values, folder: Path) -> Values:
    return {"model.path": str(folder / "plain"), **_no_system_prompt(now)}


def _conversations(now: Values, folder: Path) -> Values:
    return {f"{table}.path": write_data(now, table, folder, name="conversations") for table in data_tables(now)}


def _too_long(table: str) -> Callable[[Values, Path], Values]:
    def overrides(now: Values, folder: Path) -> Values:
        if f"{table}.path" not in now:
            return {}
        return _no_system_prompt(now) | {f"{table}.max_length_tokens": 8}

    return overrides


def _no_system_prompt(now: Values) -> Values:
    return {path: None for path, value in now.items() if path.endswith("system_prompt") and value is not None}


def _cut(now: Values, folder: Path) -> Values:
    tables = data_tables(now)
    lengths = {f"{table}.max_length_tokens": 8 for table in tables}
    return _no_system_prompt(now) | lengths | {f"{table}.too_long": "truncate" for table in tables}


def _learns_nothing(now: Values, folder: Path) -> Values:
    return {"trainer.lr": 1e-12}


def _larger(now: Values, folder: Path) -> Values:
    """Enough of whatever the config has too little of for its other options to act."""
    changed: Values = {"run.num_steps": NUM_STEPS} if now["run.num_steps"] is not None else {}
    changed |= {path: least for path, least in ENOUGH.items() if path in now and now[path] < least}
    changed |= {path: None for path in now if path.endswith("data.max_prompts")}
    if now.get("run.checkpoint_every_steps"):
        changed["run.checkpoint_every_steps"] = 1
    changed |= {path: 24 for path in now if path.endswith("data.size")}
    return changed


def _best_between_checkpoints(now: Values, folder: Path) -> Values:
    """The first evaluation, which is the best so far, is of a step without a checkpoint of its own."""
    if not now["run.checkpoint_every_steps"] or not any(
        path.startswith("eval.") and path.endswith("data.kind") for path in now
    ):
        return {}
    return {"run.checkpoint_every_steps": NUM_STEPS, "eval.every_steps": 1, "eval.at_start": False}


def _validations_between_checkpoints(now: Values, folder: Path) -> Values:
    """The best validation is of a step without a checkpoint of its own."""
    if not now["run.checkpoint_every_steps"] or "validation.data.path" not in now:
        return {}
    return {"run.num_steps": NUM_STEPS, "run.checkpoint_every_steps": NUM_STEPS, "validation.every_steps": 1}


def _out_of_reach(now: Values, folder: Path) -> Values:
    return {path: 1e9 for path, value in now.items() if path.endswith("target") and value is not None}


def _silent_teacher(now: Values, folder: Path) -> Values:
    """The address of a teacher becomes a port that nobody listens at."""
    is_remote = is_address(now["distillation.teacher"] or "")
    return {"distillation.teacher": "http://127.0.0.1:1"} if is_remote else {}


def _bounded_gap(now: Values, folder: Path) -> Values:
    """A bound that the engine of an audit does not keep."""
    return {"guards.max_logprob_gap": 1e-3}


def _soon_over(now: Values, folder: Path) -> Values:
    return {"engine.start_timeout_s": 0.6, "engine.request_timeout_s": 0.6}


_BAD_LINES = ("skip_bad_lines",)
_TEMPLATE = ("chat",)
_FOLDER = ("overwrite",)
SCENARIOS = (
    Scenario("", _as_it_is),
    Scenario("a teacher's server that is not there", _silent_teacher),
    Scenario("made-up answers", _as_it_is, probe_scorer),
    Scenario("a scorer that fails", _failing_scorer, probe_scorer, ("on_error",)),
    Scenario("a scorer that needs much memory", _demanding_scorer, probe_scorer, ("memory_limit_mb", "num_workers")),
    Scenario("a few prompts, seen again and again", _few_prompts),
    Scenario("targets that are never reached", _out_of_reach),
    Scenario("a broken line in data", _broken_line("data"), made_for=_BAD_LINES),
    Scenario("a broken line in eval.data", _broken_line("eval.data"), made_for=_BAD_LINES),
    Scenario("a broken line in eval.sets", _broken_line_of_sets, made_for=_BAD_LINES),
    Scenario("a run in the folder already", _used_folder, made_for=_FOLDER),
    Scenario("a filter that keeps nothing", _nothing_kept),
    Scenario("evaluations between two checkpoints", _best_between_checkpoints, made_for=("keep_best_checkpoint",)),
    Scenario("new weights in the middle of a response", _as_it_is, probe_mixed_versions),
    Scenario("a tokenizer without a chat template", _no_template, made_for=_TEMPLATE),
    Scenario("losses that are not finite", _as_it_is, probe_broken_losses, ("on_non_finite",)),
    Scenario("losses that jump", _as_it_is, probe_loss_jumps, ("max_loss_jump", "on_loss_jump")),
    Scenario("KLs that jump", _as_it_is, probe_kl_jumps, ("max_kl_jump", "on_kl_jump")),
    Scenario("early jumps", _as_it_is, probe_early_jumps),
    Scenario("an engine whose log-probabilities are off", _bounded_gap, made_for=("on_logprob_gap",)),
    Scenario("a larger run", _larger, is_larger=True),
)
# Of a config whose engine has servers, after the ordinary one.
SERVER_SCENARIOS = (
    Scenario("a server that is lost on the way", _as_it_is, probe_lost_server, ("max_restarts",)),
    Scenario("a server that nobody reaches", _soon_over, probe_absent_server),
    Scenario("a server that never answers", _soon_over, probe_hanging_server),
)
SFT_SCENARIOS = (
    Scenario("", _as_it_is, probe_sft),
    Scenario("a broken line in data", _broken_line("data"), probe_sft, _BAD_LINES),
    Scenario("a broken line in validation.data", _broken_line("validation.data"), probe_sft, _BAD_LINES),
    Scenario("conversations", _conversations, probe_sft),
    Scenario("demonstrations too long in data", _too_long("data"), probe_sft),
    Scenario("demonstrations too long in validation.data", _too_long("validation.data"), probe_sft),
    Scenario("demonstrations that are cut", _cut, probe_sft),
    Scenario("a run that learns nothing", _learns_nothing, probe_sft),
    Scenario("validations between two checkpoints", _validations_between_checkpoints, probe_sft),
    Scenario("a run in the folder already", _used_folder, probe_sft, _FOLDER),
    Scenario("a tokenizer without a chat template", _no_template, probe_sft, _TEMPLATE),
    Scenario("a larger run", _larger, probe_sft, is_larger=True),
)
