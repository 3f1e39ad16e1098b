"""From a launch script of slime to a config of strop that loads, and an account of every flag."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strop.compat.import_slime import critic, objective, sampling, training
from strop.compat.import_slime.account import Account, hidden, not_followed, oddities
from strop.compat.import_slime.draft import Draft, Given
from strop.compat.import_slime.purpose import purpose_of
from strop.compat.import_slime.script import Flag, read_script
from strop.compat.import_slime.shell import only_the_shell
from strop.compat.import_slime.text import known
from strop.compat.import_slime.without import WITHOUT, reason_without
from strop.compat.import_slime.written import document, nested, plain
from strop.config import TrainConfig, make_config, tree
from strop.types import ConfigError

RULES = {
    rule: tuple(flags.split()) for room in (training, sampling, objective, critic) for rule, flags in room.RULES.items()
}
MAPPED = tuple(flag for flags in RULES.values() for flag in flags)
KNOWN = (*MAPPED, *WITHOUT)
_SWITCHES = """--use-kl-loss --use-unbiased-kl --normalize-advantages --disable-grpo-std-normalization --use-tis
    --disable-rewards-normalization --use-rollout-logprobs --use-opsm --calculate-per-token-loss --apply-chat-template
    --rollout-shuffle --group-rm --use-dynamic-batch-size --rollout-skip-special-tokens --bf16 --fp16""".split()  # noqa: SIM905
_TAKE_MANY = frozenset(("--eval-prompt-data", "--rollout-stop-token-ids"))
# Options that other flags are counted with: where strop refuses one, they are counted with the value that stands.
_COUNTED = {"rollout.group_size": "--n-samples-per-prompt", "rollout.prompts_per_step": "--rollout-batch-size"}
_PROBLEM = re.compile(r"([\w.]+) ")


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
        UserError: the script cannot be read, launches nothing, or trains in a way that has no config of strop train.
    """
    script = read_script(path)
    given = Given({flag.name: flag for flag in script.flags})
    purpose = purpose_of(given, script, path.name)
    options = _options_of([flag for flag in given.flags.values() if _is_unread(flag)], given)
    unread = {name: given.flags[name] for name in options}
    read = Given({name: flag for name, flag in given.flags.items() if name not in unread})
    draft = _drafted(read)
    config, values, refused = _settle(draft, name)
    if _COUNTED.keys() & refused.keys():
        standing = tree.values(config)
        counted = {flag: str(standing[option]) for option, flag in _COUNTED.items() if option in refused}
        draft = _drafted(_with(read, counted))
        draft.rows[:] = [replace(row, flags=tuple(filter(read.has, row.flags))) for row in draft.rows]
        config, values, refused = _settle(draft, name, refused)
    now, defaults = tree.values(config), tree.defaults(config)
    written = {path: now[path] for path in values if _is_needed(path) or now[path] != defaults[path]}
    account = Account(given, now, written, refused, frozenset(o for named in options.values() for o in named))
    lines = [_unread_line(flag, options[flag.name]) for flag in unread.values()]
    comments = [_unread_comment(flag, options[flag.name]) for flag in unread.values()]
    return Imported(
        document(TrainConfig, written, [_TITLE.format(path.name), *comments]),
        purpose,
        [account.line(row) for row in draft.rows if account.is_mapped(row)],
        [account.default_line(row) for row in draft.rows if account.is_default(row)],
        [*lines, *account.without(draft.rows), *oddities(script, _most, MAPPED)],
        not_followed(script.aside),
        [hidden(note) for note in script.notes],
    )


_TITLE = "Made from {}, a launch script of slime, by strop import-slime."


def _most(flag: Flag) -> int:
    """How many words belong to a flag."""
    return 0 if flag.name in _SWITCHES else len(flag.words) if flag.name in _TAKE_MANY else 1


def _is_unread(flag: Flag) -> bool:
    """Whether an option would need a value that only the shell knows."""
    return flag.name in MAPPED and any(word.unknown for word in flag.words[: _most(flag)])


def _unread_line(flag: Flag, options: list[str]) -> str:
    """A flag whose value cannot be read, and what to set instead."""
    here = f"{', '.join(options)} {'is' if len(options) == 1 else 'are'} left at the default"
    return f"{hidden(str(flag))} (line {flag.line})\n    {only_the_shell(flag.unknown)}: {here}. Put the value into the config."


def _unread_comment(flag: Flag, options: list[str]) -> str:
    """The same as a line of the file."""
    text = f"{hidden(str(flag))} could not be read: set {' and '.join(options)}."
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _drafted(given: Given) -> Draft:
    """What the rules make of flags."""
    draft = Draft()
    for rule, flags in RULES.items():
        rule(given, draft)
        explained = {flag for row in draft.rows for flag in row.flags}
        silent = [flag for flag in flags if given.has(flag) and flag not in explained]
        assert not silent, silent
    if not given.has("--eval-interval"):
        _without_evaluation(given, draft)
    for flag in given.flags:
        if flag not in MAPPED:
            draft.without(flag, reason_without(flag))
    return draft


def _with(given: Given, values: dict[str, str]) -> Given:
    """Flags with other values, for rules to count with."""
    others = {name: Flag(name, (known(value, 0),), 0) for name, value in values.items()}
    return Given(given.flags | others)


def _options_of(flags: list[Flag], given: Given) -> dict[str, list[str]]:
    """The options that flags would set if their values were known; none for a flag that sets none."""
    rows = _drafted(given).rows if flags else []
    found = {flag.name: [row.option for row in rows if flag.name in row.flags and row.option] for flag in flags}
    return {name: list(dict.fromkeys(options)) for name, options in found.items() if options}


def _is_needed(path: str) -> bool:
    """Written whatever its value: what has no default, and the kind of a table that comes in variants."""
    is_kind = path.endswith(".kind") and path.rpartition(".")[0] in tree.union_tables(TrainConfig)
    return is_kind or any(leaf.field.is_required() for leaf in tree.leaves(TrainConfig) if leaf.path == path)


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
    draft: Draft, name: str, refused: dict[str, str] | None = None
) -> tuple[TrainConfig, dict[str, Any], dict[str, str]]:
    """The config, the values that make it, and strop's own words about those that it refuses."""
    refused = dict(refused or {})
    values = {row.option: row.value for row in draft.rows if row.option and row.option not in refused}
    while True:
        try:
            config = make_config(TrainConfig, nested(values), {}, file=name)
            now = tree.values(config)
            as_written = {option: plain(now[option]) for option in values}  # a number, not the text of one
            make_config(TrainConfig, nested(as_written), {}, file=name)
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
