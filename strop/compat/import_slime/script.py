"""What a launch script would run, found by reading it: its variables, its arrays, and the flags of the launch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from strop.compat.import_slime.words import Array, Part, Statement, Word, parts_between_quotes, read_statements
from strop.types import UserError


@dataclass(frozen=True)
class Text:
    """A word as it would be passed, the line it stands in, and the variables in it that nobody but the shell knows."""

    text: str
    line: int
    unknown: tuple[str, ...] = ()

    def joined(self, other: Text) -> Text:
        return replace(self, text=self.text + other.text, unknown=self.unknown + other.unknown)


@dataclass(frozen=True)
class Flag:
    """A flag of the launch and the words after it."""

    name: str
    values: tuple[str, ...]
    line: int
    unknown: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.name, *self.values))


@dataclass
class Script:
    """What was read: the flags in their order, words of the launch that belong to none, and what a reader should know."""

    flags: list[Flag] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_VARIABLE = re.compile(r"([A-Za-z_]\w*|[@*])(\[[@*]\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_OPENING, _CLOSING = {"if", "for", "while", "until", "case"}, {"fi", "done", "esac"}
_AROUND = {*_OPENING, *_CLOSING, "then", "elif", "else", "do", "in", "{", "}", "!", "function"}
_DECLARING = {"export", "declare", "local", "readonly", "typeset"}
# The folder of the script itself, as scripts find it: $(cd "$(dirname "$0")/.." && pwd)
_HERE = re.compile(
    r"(?:cd\s+(?:--\s+)?\"?\$\()?\s*dirname\s+(?:--\s+)?\"?(?:\$\{BASH_SOURCE(?:\[0\])?\}|\$0|\$\{0\})\"?\)?"
    r"(?P<up>[/.\w-]*)\"?\s*(?:&?>\s*/dev/null\s*(?:2>&1\s*)?)?(?:&&\s*pwd(?:\s+-P)?)?\s*"
)


def read_script(path: Path) -> Script:
    """Read a launch script; the files it sources are read too, and nothing is run.

    Raises:
        UserError: it cannot be read, is not text, a quote is open, or it launches no Python file with flags.
    """
    shell = _Shell()
    shell.read(path)
    if shell.launch is None:
        raise UserError(
            f"{path}: has no command that runs a Python file with flags, such as python3 train.py ${{ARGS[@]}}. "
            "strop import-slime takes a launch script of slime."
        )
    shell.note_conditions()
    script = Script(notes=shell.notes)
    _take_flags(shell.launch, script)
    for name, (line, values) in shell.arrays.items():
        flags = " ".join(value.text for value in values)
        if name not in shell.used and "--" in flags:
            script.notes.append(f"{name} (line {line}) is not given to the launch, so these are left out: {flags}.")
    return script


def _take_flags(words: list[Text], script: Script) -> None:
    for word in words:
        if word.text.startswith("--") and len(word.text) > 2:
            name, equals, value = word.text.partition("=")
            script.flags.append(Flag(name.replace("_", "-"), (value,) if equals else (), word.line, word.unknown))
        elif script.flags:
            last = script.flags[-1]
            unknown = last.unknown + word.unknown
            script.flags[-1] = replace(last, values=(*last.values, word.text), unknown=unknown)
        else:
            script.strays.append(word.text)


class _Shell:
    """Variables by name, as the lines are read one after the other."""

    def __init__(self) -> None:
        self.values: dict[str, Text] = {}
        self.arrays: dict[str, tuple[int, list[Text]]] = {}
        self.used: set[str] = set()
        self.notes: list[str] = []
        self.launch: list[Text] | None = None
        self._uncertain: dict[str, int] = {}  # variables that a condition or a loop sets, and the line
        self._files: list[Path] = []
        self._depth = 0
        self._launch_is_train = False

    def read(self, path: Path) -> None:
        text = _text_of(path)
        self._files.append(path)
        for statement in read_statements(text, str(path)):
            self._run(statement)
        self._files.pop()

    def note_conditions(self) -> None:
        """Say which of the variables that the launch uses are set where strop cannot know if the line is run."""
        for name, line in self._uncertain.items():
            if name in self.used:
                self.note(
                    f"{name} (line {line}) is set inside a condition or a loop; strop reads such lines once, one after the "
                    "other, so the last one counts."
                )

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _run(self, statement: Statement) -> None:
        words = list(statement.words)
        while words and isinstance(words[0], Word) and words[0].plain in _AROUND:
            keyword = words[0].plain
            self._depth += (keyword in _OPENING) - (keyword in _CLOSING)
            if keyword in ("for", "case"):
                return
            words.pop(0)
        is_certain = not statement.is_conditional and self._depth == 0
        if words and isinstance(words[0], Word) and words[0].plain in _DECLARING:
            words = [w for w in words[1:] if isinstance(w, Array) or not w.plain.startswith("-")]
        while words and self._assign(words[0], is_certain=is_certain):
            words.pop(0)
        command = [word for word in words if isinstance(word, Word)]
        if not command:
            return
        if command[0].plain in ("source", ".") and len(command) > 1:
            self._source(command[1])
        else:
            self._look_for_launch(command, statement.line)

    def _assign(self, word: Word | Array, *, is_certain: bool) -> bool:
        """True if the word sets a variable."""
        if isinstance(word, Array):
            name, is_added = word.name, word.is_added
            before = self.arrays[name][1] if is_added and name in self.arrays else []
            self.arrays[name] = (word.line, [*before, *(t for w in word.words for t in self.expand(w))])
        else:
            match = _ASSIGNMENT.match(word.plain)
            if match is None:
                return False
            name, is_added = match[1], bool(match[2])
            rest = [Part("text", word.plain[match.end() :], is_quoted=False), *word.parts[1:]]
            value = Text("", word.line)
            for part in rest:
                for text in self._pieces(replace(part, is_quoted=True), word.line):
                    value = value.joined(text)
            self.values[name] = self.values[name].joined(value) if is_added and name in self.values else value
        if not is_certain:
            self._uncertain.setdefault(name, word.line)
        return True

    def _source(self, word: Word) -> None:
        for given in self.expand(word)[:1]:
            path = Path(given.text)
            shown = f"{given.text} (sourced in line {word.line})"
            if given.unknown:
                self.note(f"{shown} is not read: {_unknown(given.unknown)}.")
            elif any(path.resolve() == file.resolve() for file in self._files):
                self.note(f"{shown} is not read again: it sources itself.")
            elif not path.is_file():
                self.note(f"{shown} is not read: there is no such file; flags in it are not seen.")
            else:
                self.read(path)

    def _look_for_launch(self, command: list[Word], line: int) -> None:
        used = set(self.used)
        words = [text for word in command for text in self.expand(word)]
        programs = [i for i, word in enumerate(words) if word.text.endswith(".py")]
        program = programs[0] if programs else None
        has_flags = program is not None and any(word.text.startswith("--") for word in words[program + 1 :])
        if program is None or not has_flags:
            self.used = used
            return
        is_train = Path(words[program].text).name.startswith("train")
        if self.launch is not None:
            self.note(f"line {line} launches {words[program].text} too; the last launch of a train*.py is read.")
        if is_train or not self._launch_is_train:
            self.launch, self._launch_is_train = words[program + 1 :], is_train

    def expand(self, word: Word) -> list[Text]:
        """The words that a word becomes: none for an empty array, several for a full one."""
        found: list[Text] = []
        current: Text | None = None
        for part in word.parts:
            for place, piece in enumerate(self._pieces(part, word.line)):
                if place and current is not None:
                    found.append(current)
                    current = None
                current = piece if current is None else current.joined(piece)
        return [*found, current] if current is not None else found

    def _pieces(self, part: Part, line: int) -> list[Text]:
        if part.kind == "text":
            return [Text(part.text, line)]
        if part.kind == "command":
            here = _HERE.fullmatch(part.text.strip())
            if here is not None:
                folder = self._files[-1].resolve().parent
                return [Text(str((Path(f"{folder}{here['up']}")).resolve()), line)]
            return [Text(f"$({part.text})", line, (f"$({part.text})",))]
        return list(self._variable(part, line))

    def _variable(self, part: Part, line: int) -> Iterator[Text]:
        match = _VARIABLE.fullmatch(part.text)
        name, is_array, operator, other = match.groups() if match else (part.text, None, None, None)
        self.used.add(name)
        if is_array or name in ("@", "*"):
            if name in self.arrays:
                yield from (replace(value, line=line) for value in self.arrays[name][1])
            elif name in self.values:
                yield from self._split(self.values[name], part.is_quoted)
            elif operator is None:
                what = "the script's own arguments" if name in ("@", "*") else name
                self.note(f"{what} (line {line}): strop does not know what is in there; flags in it are not seen.")
            return
        known = self.values.get(name)
        if known is None and name in self.arrays:
            known = self.arrays[name][1][0] if self.arrays[name][1] else Text("", line)
        is_there = known is not None and not (operator and operator[0] == ":" and not known.text)
        if operator and operator[-1] == "+":
            yield from self._split(self._quoted(other, line) if is_there else Text("", line), part.is_quoted)
        elif operator and operator[-1] in "-=" and not is_there:
            yield from self._split(self._quoted(other, line), part.is_quoted)
        elif known is not None and match is not None:
            yield from self._split(known, part.is_quoted)
        else:
            yield Text(f"${{{part.text}}}", line, (part.text,))

    def _quoted(self, text: str, line: int) -> Text:
        found = Text("", line)
        for part in parts_between_quotes(text.strip("\"'")):
            for piece in self._pieces(part, line):
                found = found.joined(piece)
        return found

    @staticmethod
    def _split(value: Text, is_quoted: bool) -> list[Text]:
        return [value] if is_quoted else [replace(value, text=text) for text in value.text.split()]


def _unknown(names: tuple[str, ...]) -> str:
    """Why a value is not known, in words."""
    shown = ", ".join(dict.fromkeys(f"${name}" if name.isidentifier() else name for name in names))
    return f"{shown} is not set in the script, and strop runs nothing to find it out"


def _text_of(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such script.") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UserError(f"{path}: is not a shell script: it is not text in UTF-8.")
    return text
