"""Every option of a config is turned, one at a time, and something must move; what moves nothing is dead."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from strop.config import TrainConfig, make_config, tree
from strop.runtime.audit.probe import Outcome
from strop.runtime.audit.scenarios import SCENARIOS, Scenario, made_small, with_varied_rewards
from strop.runtime.audit.teacher_server import TeacherModel, serving
from strop.runtime.audit.variations import other_values
from strop.runtime.audit.workshop import SOURCES, TEACHERS, write_workshop
from strop.types import ConfigError

Verdict = Literal["acts", "refused", "one value", "DEAD"]


@dataclass(frozen=True)
class Finding:
    """What became of one option."""

    path: str
    value: Any
    origin: str
    verdict: Verdict
    tried: tuple[Any, ...] = ()
    changes: dict[str, str] = field(default_factory=dict)  # made by the last value tried
    reason: str = ""  # why other values are refused
    scenario: str = ""  # in which run it acted, if not in an ordinary one
    variant: str = ""  # the kind that its table was given for this, if not the config's own


def audit(config: TrainConfig, *, every_kind: bool = False, only: str = "") -> Iterator[Finding]:
    """Findings for every option of a config, one after the other; with `every_kind` for those of all other kinds of its
    tables too, with `only` for those of one table.

    The runs have the config's [algorithm], and everything else of it, with these exceptions: model, data and scores are
    made up, batches and responses are small, what counts steps is shortened in proportion, the learning rate is so high
    that ratios leave 1, and the sampler's log-probabilities are off a little.
    """
    with tempfile.TemporaryDirectory(prefix="strop-audit-") as folder:
        write_workshop(Path(folder))
        with _teacher_server(config, Path(folder)) as server:
            runs = _Runs(config, Path(folder), server)
            for path in tree.values(config):
                if f"{path}.".startswith(f"{only}." if only else ""):
                    yield runs.examine(path)
            for table, kind in _other_kinds(config) if every_kind else ():
                if f"{table}.".startswith(f"{only}." if only else ""):
                    yield from runs.examine_kind(table, kind)


def _teacher_server(config: TrainConfig, folder: Path) -> AbstractContextManager[str]:
    """What stands for the servers of a config's teachers; no server where it has none."""
    if not config.distillation.addresses:
        return nullcontext("")
    return serving(TeacherModel(folder / TEACHERS[0]))


def _other_kinds(config: TrainConfig) -> Iterator[tuple[str, str]]:
    now = tree.values(config)
    for table in sorted(path.removesuffix(".kind") for path in now if path.endswith(".kind")):
        for kind in tree.kinds(TrainConfig, table) if tree.is_union(TrainConfig, table) else ():
            if kind != now[f"{table}.kind"]:
                yield table, kind


class _Runs:
    """Small runs of variants of one config; each scenario's run of the config itself is made once."""

    def __init__(self, config: TrainConfig, folder: Path, server: str) -> None:
        self.config, self.folder, self.server = config, folder, server
        now = tree.values(config)
        origins = {path: origin for path, origin in config.origins.items() if not origin.startswith("preset ")}
        set_here = {p: v for p, v in now.items() if any(path == p or path.startswith(f"{p}.") for path in origins)}
        self._given = set_here | made_small(config, folder, server=server)
        self._bases: dict[tuple[str, bool], Outcome] = {}

    def examine(self, path: str) -> Finding:
        """Try other values of one option, in one scenario after the other, until something moves."""
        base = self._variant(SCENARIOS[0], path, {})
        value, own = tree.values(base)[path], tree.values(self.config)[path]
        found = Finding(path, own, self.config.origin(path), "one value")
        allowed = []
        for other in self._others(base, path, value):
            try:
                self._variant(SCENARIOS[0], path, {path: other})
                allowed.append(other)
            except ConfigError as error:
                found = replace(found, verdict="refused", reason=found.reason or str(error))
        for scenario, other in product(SCENARIOS, allowed):
            changes = self._changes(scenario, path, other)
            if changes:
                where = {"changes": changes, "scenario": scenario.name}
                return replace(found, verdict="acts", tried=(other,), reason="", **where)
        return replace(found, verdict="DEAD", tried=tuple(allowed)) if allowed else found

    def examine_kind(self, table: str, kind: str) -> Iterator[Finding]:
        """The options of a table if it were of another kind."""
        variant = f"{table}.kind = {kind}"
        try:
            given = {p: v for p, v in self._given.items() if not p.startswith(f"{table}.")}
            more = _needed(table, kind, self.folder)
            config = make_config(TrainConfig, {}, given | {f"{table}.kind": kind} | more, file="audit.toml")
        except ConfigError as error:
            yield Finding(f"{table}.kind", kind, "audit", "refused", reason=str(error), variant=variant)
            return
        runs = _Runs(config, self.folder, self.server)
        for path in tree.values(config):
            if path.startswith(f"{table}.") and path != f"{table}.kind":
                yield replace(runs.examine(path), variant=variant)

    def _changes(self, scenario: Scenario, path: str, value: Any) -> dict[str, str]:
        """What setting an option changes in a scenario."""
        key = (scenario.name, path.startswith("reward."))
        if key not in self._bases:
            self._bases[key] = scenario.run(self._variant(scenario, path, {}))
        return self._bases[key].changes_to(scenario.run(self._variant(scenario, path, {path: value})))

    def _others(self, config: TrainConfig, path: str, value: Any) -> list[Any]:
        table = path.removesuffix(".kind")
        if tree.is_union(TrainConfig, path):  # a table that may be absent, and is
            kinds = tree.kinds(TrainConfig, path)[:1]
            needed = _needed(path, kinds[0], self.folder)
            return [{"kind": kinds[0], **{name.removeprefix(f"{path}."): v for name, v in needed.items()}}]
        if path in ("distillation.teacher", "distillation.teachers"):
            place = str(self.folder / TEACHERS[1])
            return [place if path.endswith("teacher") else dict.fromkeys(SOURCES, place)]
        if table != path and tree.is_union(TrainConfig, table):
            return [kind for kind in tree.kinds(TrainConfig, table) if kind != value]
        owner, _, name = path.rpartition(".")
        choices = dict(tree.walk(config))[owner].choices().get(name)
        if choices is not None:
            return [choice for choice in choices if choice != value]
        return other_values(tree.leaf_of(config, path), value)

    def _variant(self, scenario: Scenario, path: str, changed: dict[str, Any]) -> TrainConfig:
        """The config with an option changed; a table that becomes of another kind starts anew. Rewards come from the
        config's own scorer only where that is what is looked at."""
        given, now = self._given, tree.values(self.config)
        if not path.startswith("reward."):
            given = with_varied_rewards(given, now, self.folder)
        given = given | scenario.overrides(now, self.folder)
        table = path.removesuffix(".kind")
        if changed and table != path and tree.is_union(TrainConfig, table):
            given = {p: v for p, v in given.items() if not p.startswith(f"{table}.")}
        return make_config(TrainConfig, {}, given | changed, file="audit.toml")


def _needed(table: str, kind: str, folder: Path) -> dict[str, Any]:
    """What a kind cannot do without: values for its options that have no default."""
    scorer, file = "slime_score" if kind == "slime" else "score", "eval.data" if table.startswith("eval.") else "data"
    needs = {"function": f"{folder}/scorer.py:{scorer}", "name": "chain_sum", "path": f"{folder}/{file}.{kind}"}
    general = tree.general(TrainConfig, f"{table}.")
    leaves = [leaf for leaf in tree.leaves(TrainConfig) if leaf.kind == kind and leaf.path.startswith(general)]
    return {f"{table}.{leaf.name}": needs[leaf.name] for leaf in leaves if leaf.field.is_required()}
