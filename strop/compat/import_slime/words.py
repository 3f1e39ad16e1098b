"""Takes a shell script apart into words and the marks between them, and runs nothing of it.

Read are comments, quotes, line continuations, here-documents, arrays, tests in [[ ]], and the beginnings of `$`: what a
variable holds is left to whoever expands the words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from strop.types import UserError

Kind = Literal["text", "variable", "command", "arithmetic"]


@dataclass(frozen=True)
class Part:
    """A piece of a word: its letters, the inside of ${...}, a command whose output stands there, or a sum, $((...))."""

    kind: Kind
    text: str
    is_quoted: bool

    def __str__(self) -> str:
        """As it stands in the script, without quotes."""
        around = {"text": "{}", "variable": "${{{}}}", "command": "$({})", "arithmetic": "$(({}))"}
        return around[self.kind].format(self.text)


@dataclass
class Word:
    """Parts that stand together, and the line where they begin."""

    line: int
    parts: list[Part] = field(default_factory=list)

    @property
    def plain(self) -> str:
        """The text of a word without quotes and variables; of any other word what comes before the first of them."""
        return self.parts[0].text if self.parts and self.parts[0].kind == "text" and not self.parts[0].is_quoted else ""

    @property
    def keyword(self) -> str:
        """The text of a word that has neither quotes nor variables, else nothing."""
        return self.plain if len(self.parts) == 1 else ""

    def __str__(self) -> str:
        return "".join(str(part) for part in self.parts)


@dataclass
class Array:
    """NAME=(...) or NAME+=(...)."""

    line: int
    name: str
    is_added: bool
    words: list[Word] = field(default_factory=list)


@dataclass(frozen=True)
class Mark:
    """What ends or joins commands: a line's end, ; & && | || ( ) and ;;"""

    line: int
    text: str


Token = Word | Array | Mark

_NAME = re.compile(r"[A-Za-z_]\w*|[@*#?$!\-0-9]")
_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_LONG_MARKS = (";;&", ";;", ";&", "&&", "||", "|&")
_BEFORE_COMMAND = {"if", "elif", "while", "until", "then", "else", "do", "!", "{"}
_HERE = re.compile(r"<<-?[ \t]*(['\"\\]?)(\w+)\1")


def read_tokens(text: str, where: str, first_line: int = 1) -> list[Token]:
    """The words and marks of a script.

    Args:
        text: the script.
        where: its name, for messages.
        first_line: the number of its first line.

    Raises:
        UserError: a quote, a brace, a parenthesis or an array is opened and never closed; file and line are named.
    """
    return _Reader(text.replace("\r\n", "\n"), where, first_line).tokens()


def parts_between_quotes(text: str) -> list[Part]:
    """The parts of a text as they would be between double quotes."""
    return _Reader(text + '"', "").double_quoted(0)


def parts_between_braces(text: str) -> list[Part]:
    """The parts of a text as they would be behind ${NAME:- or ${NAME%, where a blank ends no word."""
    reader = _Reader(text, "")
    try:
        return reader.one_word()
    except UserError:  # an apostrophe that is no quote, as between double quotes
        return parts_between_quotes(text.replace('"', ""))


class _Reader:
    """One pass over the text; `place` is the next letter."""

    def __init__(self, text: str, where: str, first_line: int = 1) -> None:
        self.text, self.where, self.place, self.first_line = text, where, 0, first_line
        self.found: list[Token] = []
        self.array: Array | None = None
        self.word: Word | None = None
        self.here: list[str] = []  # ends of here-documents that begin at the next line
        self.skips_word = False
        self.is_in_test = False  # between [[ and ]], where && and < are words

    def tokens(self) -> list[Token]:
        while self.place < len(self.text):
            self._step(self.text[self.place])
        self._end_word()
        if self.array is not None:
            raise self._unclosed(f"the array {self.array.name}", self.array.line)
        return self.found

    def one_word(self) -> list[Part]:
        """The parts of the whole text, whatever blanks and marks are in it."""
        while self.place < len(self.text):
            letter = self.text[self.place]
            if letter == "\\":
                self._escape()
            elif letter in "'\"`$":
                self._add(self._quoted(letter))
            else:
                self._add([Part("text", letter, is_quoted=False)])
                self.place += 1
        return self.word.parts if self.word is not None else []

    def _line(self, place: int | None = None) -> int:
        return self.text.count("\n", 0, self.place if place is None else place) + self.first_line

    def _unclosed(self, what: str, line: int) -> UserError:
        return UserError(f"{self.where}, line {line}: {what} is opened and never closed.")

    def _step(self, letter: str) -> None:
        if letter == "\\":
            self._escape()
        elif letter in "'\"`$":
            self._add(self._quoted(letter))
        elif letter in " \t":
            self._end_word()
            self.place += 1
        elif letter == "#" and self.word is None:
            end = self.text.find("\n", self.place)
            self.place = len(self.text) if end < 0 else end
        elif letter in "\n;&|()<>":
            self._operator(letter)
        else:
            self._add([Part("text", letter, is_quoted=False)])
            self.place += 1

    def _escape(self) -> None:
        following = self.text[self.place + 1 : self.place + 2]
        if following != "\n":  # a backslash at the end of a line joins it to the next
            self._add([Part("text", following, is_quoted=True)])
        self.place += 2

    def _add(self, parts: list[Part]) -> None:
        if self.word is None:
            self.word = Word(self._line())
        for part in parts:
            last = self.word.parts[-1] if self.word.parts else None
            if last and last.kind == part.kind == "text" and last.is_quoted == part.is_quoted:
                self.word.parts[-1] = Part("text", last.text + part.text, part.is_quoted)
            else:
                self.word.parts.append(part)

    def _quoted(self, letter: str) -> list[Part]:
        """Parts from a quote or a dollar on; the place moves behind them."""
        start = self.place
        if letter == '"':
            return self.double_quoted(start + 1)
        if letter == "$" and self.text.startswith('"', start + 1):
            return self.double_quoted(start + 2)
        if letter == "$" and self.text.startswith("'", start + 1):
            return [self._with_escapes(start + 2)]
        if letter == "$":
            return [self._dollar(is_quoted=False)]
        end = self.text.find(letter, start + 1)
        if end < 0:
            raise self._unclosed(f"the quote {letter}", self._line(start))
        self.place = end + 1
        kind = "text" if letter == "'" else "command"
        return [Part(kind, self.text[start + 1 : end], is_quoted=letter == "'")]

    def _with_escapes(self, start: int) -> Part:
        """$'...', where a backslash and a letter are one."""
        close = re.compile(r"(?:[^'\\]|\\.)*'", re.DOTALL).match(self.text, start)
        if close is None:
            raise self._unclosed("the quote $'", self._line(start))
        self.place = close.end()
        letters = {"n": "\n", "t": "\t", "r": "\r"}
        text = re.sub(r"\\(.)", lambda match: letters.get(match[1], match[1]), close[0][:-1], flags=re.DOTALL)
        return Part("text", text, is_quoted=True)

    def double_quoted(self, place: int) -> list[Part]:
        """Parts up to the closing double quote; at least one, so that "" is a word."""
        start, self.place, parts, letters = place, place, [], ""
        while self.place < len(self.text):
            letter = self.text[self.place]
            if letter == '"':
                self.place += 1
                return [*parts, Part("text", letters, is_quoted=True)] if letters or not parts else parts
            if letter in "$`":
                parts += [Part("text", letters, is_quoted=True)] if letters else []
                letters = ""
                found = self._dollar(is_quoted=True) if letter == "$" else self._quoted("`")[0]
                parts.append(Part(found.kind, found.text, is_quoted=True))
                continue
            if letter == "\\" and self.text[self.place + 1 : self.place + 2] in '"\\$`\n':
                self.place += 1
                letter = self.text[self.place : self.place + 1].replace("\n", "")
            letters += letter
            self.place += 1
        raise self._unclosed('the quote "', self._line(start - 1))

    def _dollar(self, *, is_quoted: bool) -> Part:
        following = self.text[self.place + 1 : self.place + 2]
        if following in ("{", "("):
            return self._bracketed(following, is_quoted)
        name = _NAME.match(self.text, self.place + 1)
        if name is None:
            self.place += 1
            return Part("text", "$", is_quoted)
        self.place = name.end()
        return Part("variable", name[0], is_quoted)

    def _bracketed(self, opening: str, is_quoted: bool) -> Part:
        """${...} or $(...), whatever is nested in it."""
        start, depth, closing = self.place, 0, "}" if opening == "{" else ")"
        place = start + 1
        while place < len(self.text):
            letter = self.text[place]
            if letter == "\\":
                place += 1
            elif letter == "'" and opening == "(":
                place = self.text.find("'", place + 1)
                if place < 0:
                    break
            depth += (letter == opening) - (letter == closing)
            place += 1
            if depth == 0:
                self.place = place
                inside = self.text[start + 2 : place - 1]
                if opening == "(" and inside.startswith("(") and _closing(inside) == len(inside) - 1:
                    return Part("arithmetic", inside[1:-1], is_quoted)
                return Part("variable" if opening == "{" else "command", inside, is_quoted)
        raise self._unclosed(f"${opening}", self._line(start))

    def _operator(self, letter: str) -> None:
        if letter == "(" and self._opens_array():
            return
        if self.word is not None and self.word.keyword == "]]":
            self._end_word()
        if self.array is not None:
            self._in_array(letter)
        elif self.is_in_test:
            self._in_test(letter)
        elif letter in "<>" or self.text.startswith("&>", self.place):
            self._redirect()
        elif self.word is None and self.text.startswith("((", self.place):
            self._add([self._sum()])
        else:
            mark = next((mark for mark in _LONG_MARKS if self.text.startswith(mark, self.place)), letter)
            self._end_word()
            self.found.append(Mark(self._line(), ";;" if mark in (";;&", ";&") else mark))
            self.place += len(mark)
            if letter == "\n" and self.here:
                self._skip_here_documents()

    def _in_test(self, letter: str) -> None:
        double = self.text[self.place : self.place + 2]
        self._end_word()
        if letter not in "\n;":
            self._add([Part("text", double if double in ("&&", "||") else letter, is_quoted=False)])
            self._end_word()
        self.place += 2 if double in ("&&", "||") else 1

    def _sum(self) -> Part:
        """((...)), a sum that stands for a command."""
        end = _closing(self.text, self.place)
        inside = self.text[self.place + 2 : end - 1] if end > 0 else ""
        if end < 0:
            raise self._unclosed("((", self._line())
        self.place = end + 1
        return Part("arithmetic", inside, is_quoted=False)

    def _opens_array(self) -> bool:
        match = _ARRAY.fullmatch(self.word.plain) if self.word is not None and len(self.word.parts) == 1 else None
        if match is None or self.word is None:
            return False
        self.array, self.word = Array(self.word.line, match[1], is_added=bool(match[2])), None
        self.place += 1
        return True

    def _in_array(self, letter: str) -> None:
        assert self.array is not None
        self._end_word()
        self.place += 1
        if letter == ")":
            self.found.append(self.array)
            self.array = None

    def _redirect(self) -> None:
        """Leave out where input comes from and output goes to: 2>&1, > file, <<END."""
        if self.word is not None and self.word.plain.isdigit():
            self.word = None
        self._end_word()
        if self.text.startswith("(", self.place + 1):  # <(command), a file for as long as the command runs
            self._add([self._bracketed("(", is_quoted=False)])
            return
        here = _HERE.match(self.text, self.place)
        if here and not self.text.startswith("<<<", self.place):
            self.here.append(here[2])
            self.place = here.end()
            return
        while self.text[self.place : self.place + 1] in ("<", ">", "&", "|"):
            self.place += 1
        self.skips_word = True

    def _skip_here_documents(self) -> None:
        for end in self.here:
            close = re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE).search(self.text, self.place)
            if close is None:
                raise self._unclosed(f"the here-document {end}", self._line() - 1)
            self.place = close.end()
        self.here = []

    def _end_word(self) -> None:
        word, self.word = self.word, None
        if word is None:
            return
        if self.skips_word:
            self.skips_word = False
        elif self.array is not None:
            self.array.words.append(word)
        else:
            last = self.found[-1] if self.found else None
            is_first = not isinstance(last, Word | Array) or (
                isinstance(last, Word) and last.keyword in _BEFORE_COMMAND
            )
            self.is_in_test = word.keyword != "]]" if self.is_in_test else word.keyword == "[[" and is_first
            self.found.append(word)


def _closing(text: str, start: int = 0) -> int:
    """The place of the parenthesis that closes the one at start; -1 where there is none."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    return -1
