"""The small runs in which an option can show that it acts: an ordinary one, and those in which something goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.runtime.audit.outcome import Outcome
from strop.runtime.audit.probe import probe, probe_scorer, probe_sft
from strop.runtime.audit.small import ENOUGH, NUM_STEPS, Values, write_data


@dataclass(frozen=True)
class Scenario:
    """What is different in it, the options it sets on top, and what is run; `name` is empty for the ordinary one.

    `is_larger`: the run has more steps, tokens or samples than the config asks for. An option that acts only there is idle
    in the config's own run, and alive.
    """

    name: str
    overrides: Callable[[Values, Path], Values]
    run: Callable[[Any], Outcome] = probe
    is_larger: bool = False


def _as_it_is(now: Values, folder: Path) -> Values:
    return {}


def _broken_line(table: str) -> Callable[[Values, Path], Values]:
    def overrides(now: Values, folder: Path) -> Values:
        if now.get(f"{table}.kind") != "jsonl":
            return {}
        return {f"{table}.path": write_data(now, table, folder, broken=True)}

    return overrides


def _failing_scorer(now: Values, folder: Path) -> Values:
    names = {"function": "failing", "slime": "slime_failing"}
    kind = now["reward.kind"]
    return {"reward.function": f"{folder}/scorer.py:{names[kind]}"} if kind in names else {}


def _used_folder(now: Values, folder: Path) -> Values:
    used = folder / "used"
    used.mkdir(exist_ok=True)
    (used / "metrics.jsonl").write_text("")
    return {"run.folder": str(used)}


def _no_template(now: Values, folder: Path) -> Values:
    without = {path: None for path, value in now.items() if path.endswith("system_prompt") and value is not None}
    return {"model.path": str(folder / "plain"), **without}


def _larger(now: Values, folder: Path) -> Values:
    """Enough of whatever the config has too little of for its other options to act."""
    changed: Values = {"run.num_steps": NUM_STEPS}
    changed |= {path: least for path, least in ENOUGH.items() if path in now and now[path] < least}
    changed |= {path: None for path in now if path.endswith("data.max_prompts")}
    if now.get("run.checkpoint_every_steps"):
        changed["run.checkpoint_every_steps"] = 1
    changed |= {path: 24 for path in now if path.endswith("data.size")}
    return changed


def _out_of_reach(now: Values, folder: Path) -> Values:
    return {path: 1e9 for path, value in now.items() if path.endswith("target") and value is not None}


SCENARIOS = (
    Scenario("", _as_it_is),
    Scenario("targets that are never reached", _out_of_reach),
    Scenario("made-up answers", _as_it_is, probe_scorer),
    Scenario("a scorer that fails", _failing_scorer, probe_scorer),
    Scenario("a broken line in data", _broken_line("data")),
    Scenario("a broken line in eval.data", _broken_line("eval.data")),
    Scenario("a run in the folder already", _used_folder),
    Scenario("a tokenizer without a chat template", _no_template),
    Scenario("a larger run", _larger, is_larger=True),
)
SFT_SCENARIOS = (
    Scenario("", _as_it_is, probe_sft),
    Scenario("a broken line in data", _broken_line("data"), probe_sft),
    Scenario("a run in the folder already", _used_folder, probe_sft),
    Scenario("a tokenizer without a chat template", _no_template, probe_sft),
    Scenario("a larger run", _larger, probe_sft, is_larger=True),
)
