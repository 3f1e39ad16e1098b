"""From a launch script of slime to a config of strop that loads, and an account of every flag."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from strop.compat.import_slime.account import Account, hidden, not_followed, oddities
from strop.compat.import_slime.draft import Draft, Given
from strop.compat.import_slime.script import Flag, read_script
from strop.compat.import_slime.shell import only_the_shell
from strop.compat.import_slime.targets import Target, most_words, purpose_of, target_of
from strop.compat.import_slime.text import known
from strop.compat.import_slime.written import document, nested, plain
from strop.config import RootConfig, make_config, tree
from strop.config.base import FlagText
from strop.types import ConfigError

# Options that other flags are counted with: where strop refuses one, they are counted with the value that stands.
_COUNTED = {"rollout.group_size": "--n-samples-per-prompt", "rollout.prompts_per_step": "--rollout-batch-size"}
_PROBLEM = re.compile(r"([\w.-]+) ")


@dataclass(frozen=True)
class Imported:
    """A config as TOML, what the script is, and accounts: what maps, is strop's default anyway, has no counterpart."""

    toml: str
    purpose: str
    mapped: list[str]
    default: list[str]
    without: list[str]
    aside: list[str]  # in branches, functions and launches that are not followed
    notes: list[str]  # of reading the script
    command: Literal["train", "sft"]  # whose config it is

    def groups(self) -> list[tuple[str, list[str]]]:
        """Title and lines, as they are printed."""
        further = (("not followed", self.aside), ("in the script", self.notes))
        return [
            ("maps", self.mapped),
            ("at strop's default anyway", self.default),
            ("no counterpart", self.without),
            *((title, lines) for title, lines in further if lines),
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
    given = Given({flag.name: flag for flag in script.flags}, script.program)
    target = target_of(given)
    options = _options_of_unread(given, target)
    unread = [given.flags[name] for name in options]
    draft, config, values, refused = _settled(
        replace(given, flags={n: flag for n, flag in given.flags.items() if n not in options}), target, name
    )
    now, defaults = tree.values(config), tree.defaults(config)
    written = {path: now[path] for path in values if _is_needed(target.root, path) or now[path] != defaults[path]}
    account = Account(given, now, written, refused, frozenset(o for named in options.values() for o in named))
    comments = [_unread_comment(flag, options[flag.name]) for flag in unread]
    return Imported(
        document(target.root, written, [_title(path.name, target), *comments]),
        purpose_of(given, script, path.name),
        [account.line(row) for row in draft.rows if account.is_mapped(row)],
        [account.default_line(row) for row in draft.rows if account.is_default(row)],
        [
            *(_unread_line(flag, options[flag.name]) for flag in unread),
            *account.without(draft.rows),
            *oddities(script, most_words, target.mapped),
        ],
        not_followed(script.aside),
        [hidden(note) for note in script.notes],
        target.command,
    )


def _title(script: str, target: Target) -> str:
    whose = "" if target.command == "train" else " It is a config of strop sft."
    return f"Made from {script}, a launch script of slime, by strop import-slime.{whose}"


def _settled(given: Given, target: Target, name: str) -> tuple[Draft, RootConfig, dict[str, Any], dict[str, str]]:
    """What becomes of flags: the rows, a config that loads, its values, and strop's words about those that it refuses."""
    draft = _drafted(given, target)
    config, values, refused = _settle(draft, name, target.root)
    if _COUNTED.keys() & refused.keys():
        standing = tree.values(config)
        counted = {flag: str(standing[option]) for option, flag in _COUNTED.items() if option in refused}
        draft = _drafted(_with(given, counted), target)
        draft.rows[:] = [replace(row, flags=tuple(filter(given.has, row.flags))) for row in draft.rows]
        config, values, refused = _settle(draft, name, target.root, refused)
    return draft, config, values, refused


def _unread_line(flag: Flag, options: list[str]) -> str:
    """A flag whose value cannot be read, and what to set instead."""
    here = f"{', '.join(options)} {'is' if len(options) == 1 else 'are'} left at the default"
    return f"{hidden(str(flag))} (line {flag.line})\n    {only_the_shell(flag.unknown)}: {here}. Put the value into the config."


def _unread_comment(flag: Flag, options: list[str]) -> str:
    """The same as a line of the file."""
    text = f"{hidden(str(flag))} could not be read: set {' and '.join(options)}."
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _drafted(given: Given, target: Target) -> Draft:
    """What the rules make of flags."""
    draft = Draft()
    for rule, flags in target.rules.items():
        rule(given, draft)
        explained = {flag for row in draft.rows for flag in row.flags}
        silent = [flag for flag in flags if given.has(flag) and flag not in explained]
        assert not silent, silent
    if not given.has("--eval-interval"):
        _without_evaluation(given, draft)
    for flag in given.flags:
        if flag not in target.mapped:
            draft.without(flag, target.reason_without(flag))
    return draft


def _with(given: Given, values: dict[str, str]) -> Given:
    """Flags with other values, for rules to count with."""
    others = {name: Flag(name, (known(value, 0),), 0) for name, value in values.items()}
    return replace(given, flags=given.flags | others)


def _options_of_unread(given: Given, target: Target) -> dict[str, list[str]]:
    """Flags with values that only the shell knows, and the options that they would set."""
    flags = [
        flag.name
        for flag in given.flags.values()
        if flag.name in target.mapped and any(word.unknown for word in flag.words[: most_words(flag)])
    ]
    rows = _drafted(given, target).rows if flags else []
    found = {flag: [row.option for row in rows if flag in row.flags and row.option] for flag in flags}
    return {flag: list(dict.fromkeys(options)) for flag, options in found.items() if options}


def _is_needed(root: type[RootConfig], path: str) -> bool:
    """Written whatever its value: what has no default, and the kind of a table that comes in variants."""
    is_kind = path.endswith(".kind") and tree.is_union(root, path.rpartition(".")[0])
    general = tree.general(root, path)
    return is_kind or any(leaf.field.is_required() for leaf in tree.leaves(root) if leaf.path == general)


def _without_evaluation(given: Given, draft: Draft) -> None:
    """slime evaluates at an interval or never; a table [eval] would switch it on."""
    left_out = [row for row in draft.rows if row.option and row.option.startswith("eval.")]
    draft.rows[:] = [row for row in draft.rows if row not in left_out]
    explained = {flag for row in draft.rows for flag in row.flags}
    reason = (
        "slime never evaluates without --eval-interval, and so [eval] is left out. Add --eval-interval to the script and "
        "import it again to switch it on."
    )
    for flag in dict.fromkeys(flag for row in left_out for flag in row.flags):
        if flag not in explained and given.has(flag):
            draft.without(flag, reason)


def _settle(
    draft: Draft, name: str, root: type[RootConfig], refused: dict[str, str] | None = None
) -> tuple[RootConfig, dict[str, Any], dict[str, str]]:
    """The config, the values that make it, and strop's own words about those that it refuses."""
    refused = dict(refused or {})
    values = {row.option: row.value for row in draft.rows if row.option and row.option not in refused}
    while True:
        try:
            config = make_config(
                root, nested({option: _as_flag(value) for option, value in values.items()}), {}, file=name
            )
            now = tree.values(config)
            as_written = {option: plain(now[option]) for option in values}  # a number, not the text of one
            make_config(root, nested(as_written), {}, file=name)
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


def _as_flag(value: Any) -> Any:
    """A value as its option takes it: the words of a launch are text, and in a file text is no number."""
    if isinstance(value, list):
        return [_as_flag(one) for one in value]
    return FlagText(value) if isinstance(value, str) else value


def _option_of(problem: str, values: dict[str, Any]) -> str | None:
    """Which of these options a problem is about; of an element of a list, the list."""
    match = _PROBLEM.match(problem)
    named = match[1] if match else ""
    return next((option for option in values if f"{named}.".startswith(f"{option}.")), None)
