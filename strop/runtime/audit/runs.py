"""The small runs of one config, and what they tell of each of its options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from strop.config import ServedEngineOptions, SFTConfig, TrainConfig, make_config, tree
from strop.config.tree import Leaf
from strop.runtime.audit.finding import Finding
from strop.runtime.audit.here import DIVIDES_PROCESSES, why_no_kind_here, why_not_here
from strop.runtime.audit.outcome import Outcome
from strop.runtime.audit.probe import probe_scorer
from strop.runtime.audit.scenarios import SCENARIOS, SERVER_SCENARIOS, SFT_SCENARIOS, Scenario
from strop.runtime.audit.small import LEARNING_RATES, Values, is_of_reward, made_small, with_varied_rewards, write_data
from strop.runtime.audit.small_parts import engine_servers
from strop.runtime.audit.variations import CAN_VARY, has_one_value, is_choice, other_values
from strop.runtime.audit.workshop import function_of, supplied
from strop.types import ConfigError, UserError

Config = TrainConfig | SFTConfig


class _Trial(NamedTuple):
    """Another value of an option, as the table shows it, and what it sets."""

    value: Any
    changed: Values


class Runs:
    """Small runs of variants of one config; one that was made is not made again."""

    def __init__(self, config: Config, folder: Path, server: str, made: dict[Any, Outcome] | None = None) -> None:
        self.config, self.folder, self.server, self.root = config, folder, server, type(config)
        self.scenarios = SFT_SCENARIOS if isinstance(config, SFTConfig) else SCENARIOS
        if isinstance(config, TrainConfig) and isinstance(config.engine, ServedEngineOptions):
            self.scenarios = (self.scenarios[0], *SERVER_SCENARIOS, *self.scenarios[1:])
        self._made = {} if made is None else made
        self._given = self._small()
        self._idle = {
            f"{prefix}.{found.key}" if prefix else found.key: found.reason
            for prefix, table in tree.walk(config)
            for found in table.idle()
        }

    def _small(self) -> Values:
        """What the small runs set: the config's own, smaller, with a learning rate that they survive."""
        now, refusal = tree.values(self.config), ""
        origins = {path: origin for path, origin in self.config.origins.items() if not origin.startswith("preset ")}
        set_here = {p: v for p, v in now.items() if any(path == p or path.startswith(f"{p}.") for path in origins)}
        for small in made_small(self.config, self.folder, self.server):
            for rate in LEARNING_RATES:
                self._given = set_here | small | {"trainer.lr": rate}
                try:
                    found = self._outcome(self.scenarios[0], self._variant(self.scenarios[0], "trainer.lr", {}))
                except ConfigError as error:
                    refusal = f"its numbers cannot be made small beside one another: {error}"
                    break
                if not found.error:
                    return self._given
                refusal = found.error
                if not found.is_guard:
                    raise UserError(_failed(refusal))
        raise UserError(_failed(refusal))

    def examine(self, path: str) -> Finding:
        """Try other values of one option, in one scenario after the other, until something moves."""
        own = tree.values(self.config)[path]
        found = Finding(path, own, self.config.origin(path), "one value")
        base = self._variant(self.scenarios[0], path, {})
        if path not in tree.values(base):  # of a kind that only the config's own scorer has
            base = self._variant(self.scenarios[0], "reward.", {})
        leaf = tree.leaf_of(base, path)
        here = why_not_here(path) or self._why_no_kind_here(path)
        if here:
            return replace(found, verdict="cannot act here", reason=here)
        trials = self._trials(base, leaf)
        if not trials:
            kinds = self._kinds_of(path)
            is_one = has_one_value(leaf) or len(kinds) == 1
            why = f"the audit has no legal value for it: it can vary {CAN_VARY}, or what its workshop supplies"
            return found if is_one else replace(found, verdict="not tried", reason=why)
        allowed, refusal = self._allowed(path, trials)
        if not allowed:
            idle = self._idle.get(path, "")
            return replace(found, verdict="idle" if idle else "refused", reason=idle or refusal)
        if path == "algorithm.preset":
            return self._examine_preset(found, base, allowed)
        if is_choice(leaf) and not self._kinds_of(path):
            return self._examine_choices(found, _Trial(tree.values(base)[path], {}), allowed)
        return self._examine_values(found, allowed)

    def _examine_values(self, found: Finding, allowed: list[_Trial]) -> Finding:
        """The first value that moves something."""
        path, name, error = found.path, found.path.rpartition(".")[2], ""
        for scenario in sorted(self._in_order(path), key=lambda scenario: name not in scenario.made_for):
            before = self._as_it_is(scenario, path)
            if before is None or not before.can_be_changed(name):
                continue
            for trial in allowed:
                after = self._with(scenario, path, trial.changed)
                if after is None:
                    continue
                changes = before.changes_to(after, name, stops_by_choice=False)
                if changes:
                    return self._acting(replace(found, tried=(trial.value,), changes=changes), scenario)
                error = error or (after.error if not scenario.name else "")
        found = replace(found, tried=tuple(trial.value for trial in allowed))
        if error:
            why = f"the values that the audit has for it end the run: {error}"
            return replace(found, verdict="not tried", reason=why)
        return self._unmoved(found)

    def _in_order(self, path: str) -> list[Scenario]:
        """Scenarios, the ordinary one first, then those that are made for this option; those without a whole run before them
        for what scores by a process for each sample. The order decides how soon something is seen to move, and not whether."""
        table, _, name = path.rpartition(".")
        kind = tree.values(self.config).get(f"{table}.kind")
        is_slow = is_of_reward(path) and kind == "code" and name != "kind"
        return sorted(
            self.scenarios,
            key=lambda s: (is_slow and s.run is not probe_scorer, s.name != "", name not in s.made_for),
        )

    def _examine_choices(self, found: Finding, own: _Trial, allowed: list[_Trial]) -> Finding:
        """Every choice must differ from every other one somewhere."""
        path, name = found.path, found.path.rpartition(".")[2]
        groups, acting = [[own, *allowed]], None
        scenarios = self._in_order(path)
        while scenarios and (acting is None or _alike(groups)):
            scenario = scenarios.pop(0)
            before = self._as_it_is(scenario, path)
            split = [part for group in groups for part in self._split(scenario, path, group)]
            if acting is None and own in split[0] and len(split[0]) < len(groups[0]):
                other = next(trial for trial in groups[0] if trial not in split[0])
                after = self._with(scenario, path, other.changed)
                if before is not None and after is not None:
                    changes = before.changes_to(after, name, stops_by_choice=True)
                    acting = self._acting(replace(found, tried=(other.value,), changes=changes), scenario)
                    # Whether other words do the same may be told by any run: first by those that tell most.
                    scenarios.sort(key=lambda s: (name not in s.made_for, not s.is_larger))
            groups = split
        if acting is None:
            return self._unmoved(replace(found, tried=tuple(trial.value for trial in allowed)))
        if alike := _alike(groups):
            return replace(acting, verdict="DEAD", reason=f"{' and '.join(alike)} do the same", changes={})
        return replace(acting, tried=tuple(trial.value for trial in allowed))

    def _split(self, scenario: Scenario, path: str, group: list[_Trial]) -> list[list[_Trial]]:
        """The choices of a group, apart where their runs differ; together where a scenario cannot have one of them."""
        if len(group) == 1:
            return [group]
        found: list[tuple[Outcome, list[_Trial]]] = []
        for trial in group:
            outcome = self._with(scenario, path, trial.changed)
            if outcome is None:
                return [group]
            name = path.rpartition(".")[2]
            alike = (part for first, part in found if not first.changes_to(outcome, name, stops_by_choice=True))
            part = next(alike, None)
            if part is None:
                found.append((outcome, [trial]))
            else:
                part.append(trial)
        return [part for _, part in found]

    def _examine_preset(self, found: Finding, base: Config, allowed: list[_Trial]) -> Finding:
        """A preset is what it expands to; those options are looked at under their own names."""
        now = tree.values(base)
        for trial in allowed:
            then = tree.values(self._variant(self.scenarios[0], found.path, trial.changed))
            names = [p for p in dict.fromkeys((*now, *then)) if p != found.path and now.get(p) != then.get(p)]
            if names:
                changes = {name.removeprefix("algorithm."): "set" for name in names}
                return replace(found, verdict="acts", tried=(trial.value,), changes=changes)
        return replace(found, verdict="DEAD", tried=tuple(trial.value for trial in allowed))

    def _acting(self, found: Finding, scenario: Scenario) -> Finding:
        if scenario.is_larger:
            why = "nothing in a run of so few steps, tokens or samples; it acts in a larger one"
            return replace(found, verdict="idle", reason=self._idle.get(found.path, why))
        return replace(found, verdict="acts", scenario=scenario.name)

    def _unmoved(self, found: Finding) -> Finding:
        if found.path in self._idle:
            return replace(found, verdict="idle", reason=self._idle[found.path])
        return replace(found, verdict="DEAD")

    def examine_kind(self, table: str, kind: str, only: str) -> Iterator[Finding]:
        """The options of a table, of those that `only` means, if it were of another kind."""
        variant = f"{table}.kind = {kind}"
        here = why_no_kind_here(table, kind)
        if here:
            yield Finding(f"{table}.kind", kind, "audit", "cannot act here", reason=here, variant=variant)
            return
        needed = self._needed(table, kind)
        if needed is None:
            why = f"the audit has no values for what {variant} needs"
            yield Finding(f"{table}.kind", kind, "audit", "not tried", reason=why, variant=variant)
            return
        given = {p: v for p, v in self._given.items() if not p.startswith(f"{table}.")}
        given |= {f"{table}.kind": kind, **needed}
        if not is_of_reward(table):
            given = self._with_varied_rewards(given)
        try:
            config = make_config(self.root, {}, given, file="audit.toml")
        except ConfigError as error:
            yield Finding(f"{table}.kind", kind, "audit", "refused", reason=str(error), variant=variant)
            return
        runs = Runs(config, self.folder, self.server, self._made)
        for path in tree.values(config):
            if path.startswith(f"{table}.") and path != f"{table}.kind" and is_meant(path, only):
                yield replace(runs.examine(path), variant=variant)

    def _as_it_is(self, scenario: Scenario, path: str) -> Outcome | None:
        """What the config does in a scenario without a change; None where rules refuse it there."""
        found = self._with(scenario, path, {})
        if not scenario.name and found is not None and found.error:
            raise UserError(_failed(found.error))
        return found

    def _with(self, scenario: Scenario, path: str, changed: Values) -> Outcome | None:
        """What it does with a change to an option; None where rules refuse that there."""
        try:
            return self._outcome(scenario, self._variant(scenario, path, changed))
        except ConfigError:
            return None

    def _outcome(self, scenario: Scenario, config: Config) -> Outcome:
        key = (scenario.run, repr(tree.values(config)))
        if key not in self._made:
            self._made[key] = scenario.run(config)
        return self._made[key]

    def _allowed(self, path: str, trials: list[_Trial]) -> tuple[list[_Trial], str]:
        """The trials that the rules between options admit, and what they say of the first one that they do not."""
        allowed, refusal = [], ""
        for trial in trials:
            try:
                self._variant(self.scenarios[0], path, trial.changed)
                allowed.append(trial)
            except ConfigError as error:
                refusal = refusal or str(error)
        return allowed, refusal

    def _trials(self, base: Config, leaf: Leaf) -> list[_Trial]:
        now, path = tree.values(base), leaf.path
        if tree.is_union(self.root, path):  # a table that may be absent, and is
            kind = tree.kinds(self.root, path)[0]
            needed = self._needed(path, kind)
            return [] if needed is None else [_Trial({"kind": kind}, {f"{path}.kind": kind, **needed})]
        if tree.variants(leaf.field.annotation):
            return [_Trial("a table", {f"{path}.path": write_data(self._defaults_of(leaf), path, self.folder)})]
        kinds = self._kinds_of(path)
        if kinds:
            table = path.removesuffix(".kind")
            found = [(kind, self._needed(table, kind)) for kind in kinds if kind != now[path]]
            return [_Trial(kind, {path: kind, **needed}) for kind, needed in found if needed is not None]
        choices = dict(tree.walk(base))[path.rpartition(".")[0]].choices().get(leaf.name)
        texts = supplied(path, now, self.folder) if choices is None else choices
        return [_Trial(v, {path: v}) for v in other_values(leaf, now[path], texts)]

    def _defaults_of(self, leaf: Leaf) -> Values:
        """The options of a table of demonstrations that is absent, as they would be."""
        (owner,) = tree.variants(leaf.field.annotation)
        return {f"{leaf.path}.{name}": field.get_default() for name, field in owner.model_fields.items()}

    def _why_no_kind_here(self, path: str) -> str:
        """Of an option that names a table's kind: why this machine has none of the others."""
        others = [kind for kind in self._kinds_of(path) if kind != tree.values(self.config)[path]]
        reasons = [why_no_kind_here(path.removesuffix(".kind"), kind) for kind in others]
        return reasons[0] if reasons and all(reasons) else ""

    def _kinds_of(self, path: str) -> list[str]:
        """The kinds that a table may be of, for the option that names its kind."""
        table = path.removesuffix(".kind")
        return tree.kinds(self.root, table) if table != path and tree.is_union(self.root, table) else []

    def _needed(self, table: str, kind: str) -> Values | None:
        """What a kind cannot do without: values for its options that have no default; None where the audit has none."""
        found: Values = {}
        general = tree.general(self.root, f"{table}.")
        for leaf in tree.leaves(self.root):
            if leaf.kind == kind and leaf.path.startswith(general) and leaf.field.is_required():
                path = f"{table}.{leaf.name}"
                texts = supplied(path, {**tree.values(self.config), f"{table}.kind": kind}, self.folder)
                values = list(texts) or other_values(leaf, None)
                if not values:
                    return None
                found[path] = values[0]
        return found | (engine_servers({f"{table}.kind": kind}, self.folder) if table == "engine" else {})

    def _with_varied_rewards(self, given: Values) -> Values:
        if self.root is not TrainConfig:
            return given
        return with_varied_rewards(given, tree.values(self.config) | given, self.folder)

    def _variant(self, scenario: Scenario, path: str, changed: Values) -> Any:
        """The config with an option changed; a table that becomes of another kind starts anew. Rewards come from the
        config's own scorer only where that is what is looked at."""
        given = self._given | scenario.overrides(tree.values(self.config), self.folder)
        if path == "trainer.process_timeout_s":  # in one process it cannot be set
            given["trainer.num_processes"] = min(self.config.trainer.num_processes, 2)
        elif path in DIVIDES_PROCESSES:
            given["trainer.num_processes"] = 2
        given |= self._of_streaming(path)
        for kind in (name for name in changed if self._kinds_of(name)):
            table = kind.removesuffix(".kind")
            given = {p: v for p, v in given.items() if p != table and not p.startswith(f"{table}.")}
        if not is_of_reward(path):
            given = self._with_varied_rewards(given | changed)
        table, _, name = path.rpartition(".")
        if is_of_reward(path) and name in (
            "per",
            "weights",
        ):  # a function that returns what the option says, or named rewards
            now = tree.values(self.config) | given | changed
            if name == "per" and scenario.run is probe_scorer:
                now[path] = (
                    "turn"  # of one turn a list of one number says the same as a number, if a list is what is taken
                )
            given = given | {f"{table}.function": function_of(now, table, self.folder, is_named=name == "weights")[0]}
        return make_config(self.root, {}, given | changed, file="audit.toml")

    def _of_streaming(self, path: str) -> Values:
        """Small runs do not stream, except where that is what is looked at."""
        rollout = self.config.rollout if isinstance(self.config, TrainConfig) else None
        if rollout is None or not rollout.max_off_policy_steps:
            return {}
        if path == "rollout.streaming":
            return {path: rollout.streaming}
        if path == "rollout.mask_older_tokens" and rollout.streaming:  # in one step: the next depend on the clock
            return {path: rollout.mask_older_tokens, "rollout.streaming": True, "run.num_steps": 1}
        return {}


def _alike(groups: list[list[_Trial]]) -> list[str]:
    """Words that do the same; none means what another option says, and may do what a word does."""
    words = [[str(trial.value) for trial in group if trial.value is not None] for group in groups]
    return next((group for group in words if len(group) > 1), [])


def _failed(cause: str) -> str:
    return f"strop audit cannot tell what acts: its own small run of this config ends with an error: {cause}"


def is_meant(path: str, only: str) -> bool:
    """Is an option, or table, the one that --only names, or below it?"""
    return only == "" or f"{path}.".startswith(f"{only}.")
