"""Reads a launch script command by command, as the shell would run it without arguments, and runs nothing.

Where a condition cannot be known, the first branch that may run is followed. What stands in the others is kept aside.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from strop.compat.import_slime import conditions
from strop.compat.import_slime.blocks import Branches, Choice, Command, Function, Group, Loop, Node, read_blocks
from strop.compat.import_slime.not_followed import Aside, aside
from strop.compat.import_slime.text import Text, together, unknown
from strop.compat.import_slime.values import Variables
from strop.compat.import_slime.words import Array, Part, Word, read_tokens
from strop.types import UserError

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_ELEMENT = re.compile(r"([A-Za-z_]\w*)\[([^\]]*)\](\+?)=")
_DECLARING = {"export", "declare", "local", "readonly", "typeset"}
_SETTING = {"read", "mapfile", "readarray", "let", "getopts"}  # these give variables values that nobody can read here
_SHELLS = {"bash", "sh", "zsh", "dash"}
_MOST_ROUNDS = 50
_DEEPEST = 20


@dataclass(frozen=True)
class Launch:
    """A command that runs a Python file with flags: its line, the file, and the words behind it."""

    line: int
    program: str
    words: tuple[Text, ...]

    @property
    def is_train(self) -> bool:
        return Path(self.program).name.startswith("train")


class Shell:
    """What a script has done so far, line by line."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.variables = Variables(self.note)
        self.launches: list[Launch] = []
        self.aside: list[Aside] = []
        self.functions: dict[str, Function] = {}
        self.called: set[str] = set()
        self.uncertain: dict[str, tuple[int, str]] = {}  # variables set where strop cannot know if the line runs
        self._files: list[Path] = []
        self._why = ""  # strop cannot know if the line that it reads is run
        self._depth = 0

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def read(self, path: Path) -> None:
        """Read a file and what it sources."""
        text = _text_of(path)
        before, self.variables.file = self.variables.file, path
        self._files.append(path)
        self._run_all(read_blocks(read_tokens(text, str(path)), str(path)))
        self._files.pop()
        self.variables.file = before

    # ---- what runs ------------------------------------------------------------------------------------------------

    def _run_all(self, nodes: Sequence[Node]) -> bool | None:
        """Run commands one after the other; whether the last one succeeds, None where that is not known.

        Only tests fail here: of any other command it is taken that it succeeds.
        """
        status: bool | None = True
        joined = ""
        for node in nodes:
            is_left_out = (joined == "&&" and status is False) or (joined == "||" and status is True)
            if is_left_out:
                self._leave(node, f"behind a {joined} of line {node.line} that strop does not follow")
            elif joined and status is None:
                self._follow([node], "a condition")
                status = True
            else:
                status = self._run(node)
            joined = node.joined
        return status

    def _follow(self, nodes: Sequence[Node], why: str) -> None:
        """Run what may or may not run."""
        before, self._why = self._why, self._why or why
        self._run_all(nodes)
        self._why = before

    def _leave(self, node: Node, where: str) -> None:
        self.aside += aside([node], where, self.functions)

    def _run(self, node: Node) -> bool | None:
        if isinstance(node, Command):
            return self._command(node)
        if isinstance(node, Function):
            self.functions[node.name] = node
        elif isinstance(node, Group):
            return self._run_all(node.body)
        elif isinstance(node, Branches):
            self._branches(node)
        elif isinstance(node, Choice):
            self._choice(node)
        elif isinstance(node, Loop):
            self._loop(node)
        return True

    def _branches(self, node: Branches) -> None:
        is_found = False
        for condition, body in node.arms:
            asked = False if is_found else True if condition is None else self._asked(condition)
            if asked is False:
                where = f"in a branch of the if of line {node.line} that strop does not follow"
                self.aside += aside(body, where, self.functions)
            elif asked is None:
                self._follow(body, "a condition")
                is_found = True
            else:
                self._run_all(body)
                is_found = True

    def _asked(self, condition: list[Node]) -> bool | None:
        """A condition: of a command that is no test nobody knows if it succeeds."""
        last = condition[-1] if condition else None
        words = [word for word in last.words if isinstance(word, Word)] if isinstance(last, Command) else []
        is_known = bool(words) and conditions.is_test(words)
        status = self._run_all(condition)
        return status if is_known else None

    def _choice(self, node: Choice) -> None:
        value = self.variables.whole(node.word.parts, node.word.line)
        is_known = not value.unknown
        is_found = False
        for patterns, body in node.arms:
            fits = not is_known or any(self._fits(value, pattern) for pattern in patterns)
            if is_found or not fits:
                where = f"in a branch of the case of line {node.line} that strop does not follow"
                self.aside += aside(body, where, self.functions)
            elif is_known:
                self._run_all(body)
            else:
                self._follow(body, "a condition")
            is_found = is_found or fits

    def _fits(self, value: Text, pattern: Word) -> bool:
        return fnmatch.fnmatchcase(value.text, self.variables.whole(pattern.parts, pattern.line).text)

    def _loop(self, node: Loop) -> None:
        if node.condition:
            if self._run_all(node.condition) is False:
                self.aside += aside(node.body, f"in the loop of line {node.line}, which does not run", self.functions)
            else:
                self._follow(node.body, "a loop")
            return
        words = [text for word in node.words or () for text in self.variables.expand(word)]
        if node.words is None or any(text.unknown for text in words):
            self.variables.values[node.variable] = unknown(f"${{{node.variable}}}", node.line)
            self._follow(node.body, "a loop")
            return
        if not words:
            self.aside += aside(node.body, f"in the loop of line {node.line}, which does not run", self.functions)
        for text in words[:_MOST_ROUNDS]:
            self.variables.values[node.variable] = text
            self._run_all(node.body)
        if len(words) > _MOST_ROUNDS:
            self.note(f"the loop of line {node.line} is read for {_MOST_ROUNDS} rounds of {len(words)}.")

    # ---- a command ------------------------------------------------------------------------------------------------

    def _command(self, node: Command) -> bool | None:
        words = list(node.words)
        if words and isinstance(words[0], Word) and words[0].keyword in _DECLARING:
            words = [w for w in words[1:] if isinstance(w, Array) or not w.plain.startswith("-")]
        while words and self._assign(words[0]):
            words.pop(0)
        command = [word for word in words if isinstance(word, Word)]
        if not command:
            return True
        if conditions.is_test(command):
            if command[0].parts[0].kind == "arithmetic":
                self._forget(
                    re.findall(r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)", command[0].parts[0].text), node.line
                )
            status = conditions.holds(command, self.variables)
            return not status if node.is_negated and status is not None else status
        self._call(command, node.line)
        return True

    def _call(self, command: list[Word], line: int) -> None:
        name = command[0].keyword
        if name in self.functions:
            self._function(self.functions[name], [text for word in command[1:] for text in self.variables.expand(word)])
        elif name in ("source", ".") and len(command) > 1:
            self._source(command[1])
        elif name == "set" and len(command) > 1 and command[1].keyword == "--":
            self.variables.arguments = [text for word in command[2:] for text in self.variables.expand(word)]
        elif name == "shift" and self.variables.arguments is not None:
            count = command[1].keyword if len(command) > 1 else "1"
            self.variables.arguments = self.variables.arguments[int(count) if count.isdecimal() else 1 :]
        elif name == "unset":
            for word in command[1:]:
                self.variables.values.pop(word.plain, None)
                self.variables.arrays.pop(word.plain, None)
        elif name == "printf" and len(command) > 2 and command[1].keyword == "-v":
            self._forget([command[2].plain], line)
        elif name in _SETTING:
            self._forget([word.plain.partition("=")[0] for word in command[1:]], line)
        elif name == "eval":
            text = together([text for word in command[1:] for text in self.variables.expand(word)], line)
            self._within(text)
        else:
            self._look_for_launch(command, line)

    def _forget(self, names: Sequence[str], line: int) -> None:
        for name in names:
            self.variables.values[name] = unknown(f"${{{name}}}", line)

    def _function(self, function: Function, arguments: list[Text]) -> None:
        self.called.add(function.name)
        if self._depth >= _DEEPEST:
            self.note(f"the function {function.name} (line {function.line}) calls itself and is not read again.")
            return
        before, self.variables.arguments = self.variables.arguments, arguments
        self._depth += 1
        self._run(function.body)
        self._depth -= 1
        self.variables.arguments = before

    def _within(self, text: Text) -> None:
        """Read a command that stands in a word, as bash -c and eval do."""
        if self._depth >= _DEEPEST:
            self.note(f"the command in line {text.line} runs itself and is not read again.")
            return
        self._depth += 1
        where = str(self._files[-1])
        self._run_all(read_blocks(read_tokens(text.text, where, text.line), where))
        self._depth -= 1

    def _source(self, word: Word) -> None:
        for given in self.variables.expand(word)[:1]:
            path = Path(given.text)
            shown = f"{given.text} (sourced in line {word.line})"
            if given.unknown:
                self.note(f"{shown} is not read: {only_the_shell(given.unknown)}.")
            elif any(path.resolve() == file.resolve() for file in self._files):
                self.note(f"{shown} is not read again: it sources itself.")
            elif not path.is_file():
                self.note(f"{shown} is not read: there is no such file; flags in it are not seen.")
            else:
                self.read(path)

    def _look_for_launch(self, command: list[Word], line: int) -> None:
        used = set(self.variables.used)
        words = [text for word in command for text in self.variables.expand(word)]
        for place, word in enumerate(words[:-2]):
            option = words[place + 1].text
            if Path(word.text).name in _SHELLS and re.fullmatch(r"-[a-z]*c", option):
                self._within(words[place + 2])
                return
        programs = [i for i, word in enumerate(words) if word.text.endswith(".py")]
        program = programs[0] if programs else None
        if program is None or not any(word.text.startswith("--") for word in words[program + 1 :]):
            self.variables.used = used
            return
        self.launches.append(Launch(line, words[program].text, tuple(words[program + 1 :])))

    # ---- variables ------------------------------------------------------------------------------------------------

    def _assign(self, word: Word | Array) -> bool:
        """True if the word sets a variable."""
        if isinstance(word, Array):
            values = [text for w in word.words for text in self.variables.expand(w)]
            before = self.variables.arrays.get(word.name, (0, []))[1]
            if not word.is_added:
                self._note_lost(word.name, word.line, before, values)
            self.variables.arrays[word.name] = (word.line, [*before, *values] if word.is_added else values)
            self._mark(word.name, word.line)
            return True
        element = _ELEMENT.match(str(word)) if word.plain else None
        if element is not None:
            self._set_element(word, element)
            return True
        match = _ASSIGNMENT.match(word.plain)
        if match is None:
            return False
        rest = [Part("text", word.plain[match.end() :], is_quoted=False), *word.parts[1:]]
        self._set(match[1], self.variables.whole(rest, word.line), is_added=bool(match[2]))
        return True

    def _set(self, name: str, value: Text, *, is_added: bool) -> None:
        before = self.variables.values.get(name)
        self.variables.values[name] = before.joined(value) if is_added and before is not None else value
        self._mark(name, value.line)

    def _mark(self, name: str, line: int) -> None:
        if self._why:
            self.uncertain.setdefault(name, (line, self._why))

    def _note_lost(self, name: str, line: int, before: list[Text], after: list[Text]) -> None:
        kept = {text.text for text in after}
        if name not in self.variables.used and any(t.text.startswith("--") and t.text not in kept for t in before):
            gone = " ".join(text.text for text in before)
            self.note(f"{name} is set anew in line {line}, so these are left out: {gone}.")

    def _set_element(self, word: Word, match: re.Match[str]) -> None:
        """NAME[1]=value."""
        name, index, is_added = match[1], self.variables.number(match[2], word.line), bool(match[3])
        line, elements = self.variables.arrays.get(name, (word.line, []))
        value = self.variables.whole(_behind(word, match.end()), word.line)
        if index is None or not -len(elements) <= index <= len(elements):
            self.note(f"{word} (line {word.line}) is not read: strop cannot tell which element of {name} it sets.")
            return
        elements = list(elements)
        if index == len(elements):
            elements.append(value)
        else:
            elements[index] = elements[index].joined(value) if is_added else value
        self.variables.arrays[name] = (line, elements)
        self._mark(name, word.line)


def _behind(word: Word, length: int) -> list[Part]:
    """The parts of a word behind its first letters, of what str(word) shows."""
    rest = list(word.parts)
    while length > 0 and rest:
        shown = str(rest[0])
        if length < len(shown):
            rest[0] = replace(rest[0], text=shown[length:])
            return rest
        length -= len(shown)
        rest.pop(0)
    return rest


def only_the_shell(sources: tuple[str, ...]) -> str:
    """Why a value is not known, in words."""
    shown = ", ".join(dict.fromkeys(_short(source) for source in sources))
    if all(source.startswith("${") for source in sources):
        return f"{shown} is not set in the script, and strop runs nothing to find it out"
    return f"{shown} is known only when the script runs, and strop runs nothing"


def _short(source: str) -> str:
    """$X for ${X}."""
    name = source[2:-1] if source.startswith("${") else ""
    return f"${name}" if name.isidentifier() or name.isdigit() else source


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
