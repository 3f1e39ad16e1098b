"""What a launch script would run, found by reading it: the flags of its launch, and what a reader should know."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from strop.compat.import_slime.not_followed import Aside, aside
from strop.compat.import_slime.shell import Launch, Shell, only_the_shell
from strop.compat.import_slime.text import Text
from strop.types import UserError


@dataclass(frozen=True)
class Flag:
    """A flag of the launch and the words after it."""

    name: str
    words: tuple[Text, ...]
    line: int

    @property
    def values(self) -> tuple[str, ...]:
        return tuple(word.text for word in self.words)

    @property
    def unknown(self) -> tuple[str, ...]:
        """What in its values only the shell knows."""
        return tuple(source for word in self.words for source in word.unknown)

    def __str__(self) -> str:
        return " ".join((self.name, *self.values))


@dataclass
class Script:
    """What was read.

    Attributes:
        program: the Python file that is launched, and the line.
        flags: of the launch, in their order.
        strays: words of the launch that belong to no flag.
        aside: flags in branches, functions and launches that are not followed.
        notes: what else a reader should know.
    """

    program: str
    line: int
    flags: list[Flag] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    aside: list[Aside] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_script(path: Path) -> Script:
    """Read a launch script; the files it sources are read too, and nothing is run.

    Raises:
        UserError: it cannot be read, is not text, a quote or a block is open, or it launches no Python file with flags.
    """
    shell = Shell()
    shell.read(path)
    if not shell.launches:
        raise UserError(
            f"{path}: has no command that runs a Python file with flags, such as python3 train.py ${{ARGS[@]}}. "
            "strop import-slime takes a launch script of slime."
        )
    trains = [launch for launch in shell.launches if launch.is_train]
    launch = (trains or shell.launches)[-1]
    script = Script(launch.program, launch.line, notes=shell.notes, aside=shell.aside)
    _take_flags(launch, script)
    _other_launches(shell, launch, script)
    _functions(shell, script)
    _notes(shell, launch, script)
    return script


def _take_flags(launch: Launch, script: Script) -> None:
    for word in launch.words:
        if word.text.startswith("--") and len(word.text) > 2:
            name, equals, rest = word.text.partition("=")
            value = (_behind(word, len(name) + 1),) if equals and rest else (word.with_text(""),) if equals else ()
            script.flags.append(Flag(name.replace("_", "-"), value, word.line))
        elif script.flags:
            last = script.flags[-1]
            script.flags[-1] = Flag(last.name, (*last.words, word), last.line)
        else:
            script.strays.append(word.text)


def _behind(word: Text, start: int) -> Text:
    """A word without its first letters, which are known."""
    first, *others = word.pieces
    if not first.is_known or len(first.text) < start:
        return word
    cut = word.with_text(first.text[start:])
    return replace(word, pieces=(*cut.pieces, *others))


def _other_launches(shell: Shell, taken: Launch, script: Script) -> None:
    """Launches that are not read, and those of their flags that the one that is read does not have."""
    shown = {str(flag) for flag in script.flags}
    for launch in shell.launches:
        if launch is taken:
            continue
        where = f"line {launch.line} launches {launch.program} too"
        script.notes.append(f"{where}; the last launch of a train*.py is read.")
        if launch.is_train or not taken.is_train:
            other = Script(launch.program, launch.line)
            _take_flags(launch, other)
            where = f"at the launch of line {launch.line}, which is not the last"
            script.aside += [Aside(str(flag), flag.line, where) for flag in other.flags if str(flag) not in shown]
    script.notes[:] = dict.fromkeys(script.notes)


def _functions(shell: Shell, script: Script) -> None:
    for name, function in shell.functions.items():
        if name not in shell.called:
            where = f"in the function {name} (line {function.line}), which nothing calls"
            script.aside += aside([function], where, shell.functions)


def _notes(shell: Shell, launch: Launch, script: Script) -> None:
    """Variables that are set where nobody knows if the line runs, defaults that stand for variables, flags left over."""
    used = shell.variables.used
    given = frozenset[str]().union(*(word.through for word in launch.words))
    for name, (line, why) in shell.uncertain.items():
        if name in given:
            follows = "strop follows the first branch that may run" if why == "a condition" else "strop reads it once"
            script.notes.append(f"{name} (line {line}) is set inside {why} that strop cannot know; {follows}.")
    for flag in script.flags:
        defaults = dict.fromkeys(source for word in flag.words for source in word.defaults)
        if defaults:
            sources = ", ".join(defaults)
            script.notes.append(
                f"{flag} (line {flag.line}): the value is the default of {sources}, which the script does not set."
            )
    left = {name: (line, " ".join(t.text for t in words)) for name, (line, words) in shell.variables.arrays.items()}
    left |= {name: (value.line, value.text) for name, value in shell.variables.values.items()}
    for name, (line, text) in left.items():
        if name not in used and any(word.startswith("--") for word in text.split()):
            script.notes.append(f"{name} (line {line}) is not given to the launch, so these are left out: {text}.")


__all__ = ["Aside", "Flag", "Script", "only_the_shell", "read_script"]
