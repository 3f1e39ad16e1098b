"""From a launch script of slime to a config of strop that loads, and an account of every flag."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomlkit

from strop.compat.import_slime import critic, distillation, objective, sampling, sft, training
from strop.compat.import_slime.draft import SECRET, Draft, Given, Row
from strop.compat.import_slime.script import Flag, Script, read_script
from strop.compat.import_slime.without import WITHOUT, reason_without
from strop.config import RootConfig, SFTConfig, TrainConfig, make_config, tree
from strop.types import ConfigError

RULES = {
    rule: tuple(flags.split())
    for room in (training, sampling, objective, critic, distillation)
    for rule, flags in room.RULES.items()
}
MAPPED = tuple(flag for flags in RULES.values() for flag in flags)
KNOWN = (*MAPPED, *WITHOUT)
_OF_REINFORCEMENT = "is of sampling, rewards or reinforcement learning, which strop sft has none of."
_SWITCHES = """--use-kl-loss --use-unbiased-kl --use-opd --normalize-advantages --disable-grpo-std-normalization --use-tis
    --disable-rewards-normalization --use-rollout-logprobs --use-opsm --calculate-per-token-loss --apply-chat-template
    --rollout-shuffle --group-rm --use-dynamic-batch-size --rollout-skip-special-tokens --bf16 --fp16
    --skip-eval-before-train""".split()  # noqa: SIM905
_TAKE_MANY = frozenset(("--eval-prompt-data", "--rollout-stop-token-ids"))
_PROBLEM = re.compile(r"([\w.-]+) ")


@dataclass(frozen=True)
class _Target:
    """What a launch becomes: a config of one command, by rules of its own."""

    command: Literal["train", "sft"]
    root: type[TrainConfig] | type[SFTConfig]
    rules: dict[Callable[[Given, Draft], None], tuple[str, ...]]

    @property
    def mapped(self) -> set[str]:
        return {flag for flags in self.rules.values() for flag in flags}

    def reason_without(self, flag: str) -> str:
        is_of_training = self.command == "sft" and flag in MAPPED and flag not in WITHOUT
        return _OF_REINFORCEMENT if is_of_training else reason_without(flag)


_TRAIN = _Target("train", TrainConfig, RULES)
_SFT = _Target("sft", SFTConfig, {r: tuple(f.split()) for room in (training, sft) for r, f in room.RULES.items()})
SFT_MAPPED = tuple(flag for flags in _SFT.rules.values() for flag in flags)


@dataclass(frozen=True)
class Imported:
    """A config as TOML, and three accounts: what maps, what is strop's default anyway, what has no counterpart."""

    toml: str
    mapped: list[str]
    default: list[str]
    without: list[str]
    notes: list[str]  # of reading the script
    command: Literal["train", "sft"]  # whose config it is

    def groups(self) -> list[tuple[str, list[str]]]:
        """Title and lines, as they are printed."""
        notes = [("in the script", self.notes)] if self.notes else []
        return [
            ("maps", self.mapped),
            ("at strop's default anyway", self.default),
            ("no counterpart", self.without),
            *notes,
        ]


def import_script(path: Path, name: str) -> Imported:
    """Read a launch script of slime and write it as a config.

    Args:
        path: the script.
        name: of the config, for messages.

    Raises:
        UserError: the script cannot be read, or launches nothing.
    """
    script = read_script(path)
    given = Given({flag.name: flag for flag in script.flags})
    draft = Draft()
    target = _SFT if sft.is_sft(given) else _TRAIN
    for rule, flags in target.rules.items():
        rule(given, draft)
        explained = {flag for row in draft.rows for flag in row.flags}
        silent = [flag for flag in flags if given.has(flag) and flag not in explained]
        assert not silent, silent
    for flag in given.flags:
        if flag not in target.mapped:
            draft.without(flag, target.reason_without(flag))
    config, values, refused = _settle(draft, name, target.root)
    now, defaults = tree.values(config), tree.defaults(config)
    written = {path: now[path] for path in values if _is_needed(target.root, path) or now[path] != defaults[path]}
    account = _Account(given, now, written, refused)
    return Imported(
        _toml(written, path.name, target),
        [account.line(row) for row in draft.rows if account.is_mapped(row)],
        [account.default_line(row) for row in draft.rows if account.is_default(row)],
        [*account.without(draft.rows), *_oddities(script, target.mapped)],
        script.notes,
        target.command,
    )


def _oddities(script: Script, mapped: set[str]) -> list[str]:
    """Words that belong to no flag, flags that stand there twice, and values that only the shell knows."""
    found = [f"{word}\n    belongs to no flag." for word in script.strays]
    last = {flag.name: flag for flag in script.flags}
    for flag in script.flags:
        known = flag.name in mapped
        most = 0 if flag.name in _SWITCHES else len(flag.values) if flag.name in _TAKE_MANY else 1
        if last[flag.name] is not flag:
            found.append(f"{_shown(flag)} (line {flag.line})\n    is given again later, and the last one counts.")
        elif known and len(flag.values) > most:
            found.append(
                f"{' '.join(flag.values[most:])} (line {flag.line})\n    belongs to no flag: {flag.name} takes {most}."
            )
        if flag.unknown and known and last[flag.name] is flag:
            names = ", ".join(dict.fromkeys(f"${name}" for name in flag.unknown))
            found.append(
                f"{_shown(flag)} (line {flag.line})\n    {names} is not set in the script, and strop runs nothing to find it "
                "out: put its value into the config."
            )
    return found


def _shown(flag: Flag) -> str:
    return f"{flag.name} ..." if flag.name in SECRET else str(flag)


def _is_needed(root: type[RootConfig], path: str) -> bool:
    """Written whatever its value: what has no default, and the kind of a table that comes in variants."""
    is_kind = path.endswith(".kind") and tree.is_union(root, path.rpartition(".")[0])
    general = tree.general(root, path)
    return is_kind or any(leaf.field.is_required() for leaf in tree.leaves(root) if leaf.path == general)


def _settle(draft: Draft, name: str, root: type[RootConfig]) -> tuple[RootConfig, dict[str, Any], dict[str, str]]:
    """The config, the values that make it, and strop's own words about those that it refuses."""
    values = {row.option: row.value for row in draft.rows if row.option}
    refused: dict[str, str] = {}
    while True:
        try:
            config = make_config(root, _nested(values), {}, file=name)
            now = tree.values(config)
            as_written = {option: _plain(now[option]) for option in values}  # a number, not the text of one
            make_config(root, _nested(as_written), {}, file=name)
        except ConfigError as error:
            lines = [line.removeprefix(f"{name}: ").removesuffix(f" ({name})") for line in str(error).split("\n")]
            problems = ((_option_of(line, values), line) for line in lines)
            wrong = {option: line for option, line in problems if option}
            if not wrong:
                raise
            refused |= wrong
            values = {path: value for path, value in values.items() if path not in wrong}
        else:
            return config, values, refused


def _option_of(problem: str, values: dict[str, Any]) -> str | None:
    """Which of these options a problem is about; of an element of a list, the list."""
    match = _PROBLEM.match(problem)
    named = match[1] if match else ""
    return next((option for option in values if f"{named}.".startswith(f"{option}.")), None)


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, value in values.items():
        *tables, last = path.split(".")
        table = found
        for part in tables:
            table = table.setdefault(part, {})
        table[last] = value
    return found


class _Account:
    """The lines that say what became of each flag."""

    def __init__(self, given: Given, now: dict[str, Any], written: dict[str, Any], refused: dict[str, str]) -> None:
        self._given, self._now, self._written, self._refused = given, now, written, refused

    def _flags(self, row: Row) -> str:
        shown = [_shown(self._given.flags[flag]) for flag in row.flags]
        return ", ".join(shown) or "(slime's default)"

    def is_mapped(self, row: Row) -> bool:
        """What the file says; values that stand for the reader's own are no mapping."""
        return bool(row.option) and row.option in self._written and not row.words.startswith("!")

    def is_default(self, row: Row) -> bool:
        """Flags whose option is left out of the file, since strop's default is the same."""
        is_left_out = row.option in self._now and row.option not in self._written and row.option not in self._refused
        return bool(row.flags) and (row.option == "" or is_left_out)

    def line(self, row: Row) -> str:
        value = _toml_value(self._now[row.option or ""])
        words = f"  ({row.words})" if row.words else ""
        return f"{self._flags(row)}  ->  {row.option} = {value}{words}"

    def default_line(self, row: Row) -> str:
        words = row.words if row.option == "" else f"{row.option} is {_toml_value(self._now[row.option or ''])}"
        return f"{self._flags(row)}  ({words})"

    def without(self, rows: list[Row]) -> list[str]:
        """Flags under the reason that they share, and what stands in the file for the reader to replace."""
        by_reason: dict[str, list[str]] = {}
        for row in rows:
            if row.words.startswith("! ") and row.words != "! ":
                by_reason.setdefault(f"{row.words[2:]}.", []).append(f'{row.option} = "{row.value}"')
            elif row.option is None:
                by_reason.setdefault(row.words, []).append(self._flags(row))
            elif row.option in self._refused:
                by_reason.setdefault(self._refused[row.option], []).append(self._flags(row))
        return [f"{', '.join(flags)}\n    {reason}" for reason, flags in by_reason.items()]


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {len(value)} values }}"
    return tomlkit.item("none" if value is None else list(value) if isinstance(value, tuple) else value).as_string()


def _toml(written: dict[str, Any], script: str, target: _Target) -> str:
    """The file, in the order of the tree of options."""
    document = tomlkit.document()
    whose = "" if target.command == "train" else " It is a config of strop sft."
    document.add(tomlkit.comment(f"Made from {script}, a launch script of slime, by strop import-slime.{whose}"))
    places = {path: place for place, path in enumerate(tree.paths(target.root))}
    order = sorted(written, key=lambda path: places[tree.general(target.root, path)])
    _fill(document, _nested({path: _plain(written[path]) for path in order}))
    return tomlkit.dumps(document)


def _plain(value: Any) -> Any:
    return "none" if value is None else list(value) if isinstance(value, tuple) else value


def _fill(container: Any, values: dict[str, Any]) -> None:
    plain = [name for name, value in values.items() if not isinstance(value, dict)]
    for name in sorted(plain, key=lambda name: name != "kind"):
        container.add(name, values[name])
    for name, value in values.items():
        if isinstance(value, dict):
            table = tomlkit.table()
            _fill(table, value)
            container.add(name, table)
