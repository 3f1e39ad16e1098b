"""The variables of a shell script as its lines are read, and what words become with them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from strop.compat.import_slime import sums
from strop.compat.import_slime.text import Text, known, together, unknown
from strop.compat.import_slime.words import Part, Word, parts_between_braces, parts_between_quotes

_VARIABLE = re.compile(
    r"(?P<length>#(?=.))?(?P<name>[A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[(?P<index>[^\]]*)\])?(?P<rest>.*)", re.DOTALL
)
_DEFAULT = re.compile(r":?[-=+?]")
_CUT = re.compile(r"##|#|%%|%")
_SLICE = re.compile(r":\s*(-?\w+|\s-\d+)\s*(?::\s*(-?\w+)\s*)?")
_REPLACED = re.compile(r"(/[/#%]?)((?:\\.|[^/\\])+)(?:/(.*))?", re.DOTALL)
_NAME = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
# The folder of the script itself, as scripts find it: $(cd "$(dirname "$0")/.." && pwd)
_HERE = re.compile(
    r"(?:cd\s+(?:--\s+)?\"?\$\()?\s*dirname\s+(?:--\s+)?\"?(?:\$\{BASH_SOURCE(?:\[0\])?\}|\$0|\$\{0\})\"?\)?"
    r"(?P<up>[/.\w-]*)\"?\s*(?:&?>\s*/dev/null\s*(?:2>&1\s*)?)?(?:&&\s*pwd(?:\s+-P)?)?\s*"
)


class Variables:
    """Values by name. A value that only the shell knows stands there as it is written."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.values: dict[str, Text] = {}
        self.arrays: dict[str, tuple[int, list[Text]]] = {}
        self.used: set[str] = set()
        self.arguments: list[Text] | None = None  # of the function that runs; None in the script itself
        self.file = Path()
        self._note = note

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

    def whole(self, parts: Sequence[Part], line: int) -> Text:
        """Parts as one word, whatever blanks are in them: the value of an assignment."""
        pieces = (text for part in parts for text in self._pieces(replace(part, is_quoted=True), line))
        found = Text(line)
        for piece in pieces:
            found = found.joined(piece)
        return found

    def number(self, written: str, line: int) -> int | None:
        """The result of a sum with variables in it; None where it is not known."""
        text = self.whole(parts_between_quotes(written), line)
        if text.unknown:
            return None
        names = {match[1] for match in _NAME.finditer(text.text)}
        values = {name: self.values.get(name) for name in names}
        self.used |= names
        filled = text.text
        for name, value in values.items():
            if value is None or value.unknown or not sums.is_number(value.text):
                return None
            filled = re.sub(rf"\b{name}\b", f"({int(value.text)})", filled)
        return sums.result(filled)

    def _pieces(self, part: Part, line: int) -> list[Text]:
        if part.kind == "text":
            return [known(part.text, line)]
        if part.kind == "arithmetic":
            value = self.number(part.text, line)
            return [unknown(str(part), line) if value is None else known(str(value), line)]
        if part.kind == "command":
            if not part.text.strip() or (part.text.lstrip().startswith("#") and "\n" not in part.text):
                return []  # nothing but a comment
            here = _HERE.fullmatch(part.text.strip())
            if here is not None:
                return [known(str(Path(f"{self.file.resolve().parent}{here['up']}").resolve()), line)]
            return [unknown(str(part), line)]
        texts = self._variable(part, line)
        return texts if part.is_quoted else [word for text in texts for word in text.split()]

    def _variable(self, part: Part, line: int) -> list[Text]:
        match = _VARIABLE.fullmatch(part.text)
        if match is None:
            return [unknown(str(part), line)]
        name, index = match["name"], match["index"]
        self.used.add(name)
        found = self._all(part, match, line) if (index or name) in ("@", "*") else self._single(part, match, line)
        return [replace(text, through=text.through | {name}) for text in found]

    def _single(self, part: Part, match: re.Match[str], line: int) -> list[Text]:
        """${NAME}, ${NAME[1]}, and what changes them."""
        name, index, rest = match["name"], match["index"], match["rest"]
        value = self._one(name, index, line)
        if match["length"]:
            is_known = value is not None and not value.unknown and not rest
            return [known(str(len(value.text)), line) if value and is_known else unknown(str(part), line)]
        default = _DEFAULT.match(rest)
        if default is not None:
            return self._with_default(part, value, default[0], rest[default.end() :], line)
        if value is None or (rest and value.unknown):
            return [unknown(str(part), line)]
        return [replace(value, line=line) if not rest else self._changed(value, rest, part, line)]

    def _one(self, name: str, index: str | None, line: int) -> Text | None:
        """A variable, an element of an array, or an argument; None where it is not set."""
        if name == "0":
            return known(str(self.file), line)
        if name == "#":
            return known(str(len(self.arguments or ())), line)
        if name.isdigit():
            place = int(name) - 1
            return self.arguments[place] if self.arguments is not None and place < len(self.arguments) else None
        if index is None and name in self.values:
            return self.values[name]
        elements = self.arrays[name][1] if name in self.arrays else None
        place = self.number(index or "0", line)
        if elements is None or place is None:
            return None
        return elements[place] if -len(elements) <= place < len(elements) else known("", line)

    def _all(self, part: Part, match: re.Match[str], line: int) -> list[Text]:
        """${NAME[@]} and $@, or a slice of them."""
        name, rest = match["name"], match["rest"]
        elements = self._elements(name)
        default = _DEFAULT.match(rest)
        if default is not None and not elements:
            return self._with_default(part, None, default[0], rest[default.end() :], line)
        if elements is None or (rest and default is None and not _SLICE.fullmatch(rest)):
            what = "the script's own arguments" if name in ("@", "*") else name
            self._note(f"{what} (line {line}): strop does not know what is in there; flags in it are not seen.")
            return []
        if match["length"]:
            return [known(str(len(elements)), line)]
        sliced = _SLICE.fullmatch(rest)
        if sliced is not None:
            start, count = self.number(sliced[1], line), self.number(sliced[2], line) if sliced[2] else len(elements)
            if start is None or count is None or count < 0:
                return [unknown(str(part), line)]
            start -= name in ("@", "*") and start > 0  # arguments are counted from 1
            elements = elements[start:][:count]
        found = [replace(value, line=line) for value in elements]
        is_one = part.is_quoted and "*" in (name, match["index"])
        return [together(found, line)] if is_one else found

    def _elements(self, name: str) -> list[Text] | None:
        if name in ("@", "*"):
            return self.arguments
        if name in self.arrays:
            return self.arrays[name][1]
        return [self.values[name]] if name in self.values else None

    def _with_default(self, part: Part, value: Text | None, operator: str, other: str, line: int) -> list[Text]:
        """${X:-other} and its like."""
        is_there = value is not None and not (operator[0] == ":" and not value.text)
        if operator[-1] == "+":
            return [self._between_braces(other, line) if is_there else known("", line)]
        if is_there and value is not None:
            return [replace(value, line=line)]
        if operator[-1] == "?":
            return [unknown(str(part), line)]
        found = self._between_braces(other, line)
        if value is None:  # nobody but the shell knows whether it is set; in the script it is not
            found = replace(found, defaults=(*found.defaults, str(part)))
        return [found]

    def _between_braces(self, text: str, line: int) -> Text:
        return self.whole(parts_between_braces(text), line)

    def _changed(self, value: Text, rest: str, part: Part, line: int) -> Text:
        """${X%.tar}, ${X##*/}, ${X/a/b}, ${X:0:3}, ${X,,} of a value that is known."""
        text, cut, replaced, sliced = value.text, _CUT.match(rest), _REPLACED.fullmatch(rest), _SLICE.fullmatch(rest)
        if rest in ("^^", ",,"):
            return value.with_text(text.upper() if rest == "^^" else text.lower())
        if cut is not None:
            pattern = self._between_braces(rest[cut.end() :], line)
            return unknown(str(part), line) if pattern.unknown else value.with_text(_cut(text, pattern.text, cut[0]))
        if replaced is not None:
            old, new = self._between_braces(replaced[2], line), self._between_braces(replaced[3] or "", line)
            if not old.unknown and not new.unknown:
                return value.with_text(_exchanged(text, old.text.replace("\\", ""), new.text, replaced[1]))
        if sliced is not None:
            start, count = self.number(sliced[1], line), self.number(sliced[2], line) if sliced[2] else len(text)
            if start is not None and count is not None and count >= 0:
                return value.with_text(text[start:][:count])
        return unknown(str(part), line)


def _cut(text: str, pattern: str, how: str) -> str:
    """Without the shortest beginning (#) or end (%) that fits a pattern; ## and %% take the longest."""
    places = list(range(len(text) + 1))
    is_start = how[0] == "#"
    shortest_first = places if is_start else places[::-1]
    for place in shortest_first if len(how) == 1 else shortest_first[::-1]:
        part = text[:place] if is_start else text[place:]
        if fnmatch.fnmatchcase(part, pattern):
            return text[place:] if is_start else text[:place]
    return text


def _exchanged(text: str, old: str, new: str, how: str) -> str:
    """The first match exchanged; all with //, one at the beginning with /#, one at the end with /%."""
    pattern = fnmatch.translate(old).removesuffix(r"\Z").removesuffix(r"\z")
    if how == "/#":
        pattern = rf"\A{pattern}"
    if how == "/%":
        pattern = rf"{pattern}\Z"
    return re.sub(pattern, lambda _: new, text, count=0 if how == "//" else 1)
