"""What is known of a word of a shell script before the script runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Piece:
    """Letters that are known, or, as they stand in the script, those that only the shell will know."""

    text: str
    is_known: bool = True


@dataclass(frozen=True)
class Text:
    """A word as it would be passed.

    Attributes:
        line: where it stands.
        pieces: its letters.
        defaults: those, like ${X:-1}, that are taken for variables in it.
        through: names of the variables that it was in.
    """

    line: int
    pieces: tuple[Piece, ...] = ()
    defaults: tuple[str, ...] = ()
    through: frozenset[str] = frozenset()

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The pieces that only the shell knows."""
        return tuple(piece.text for piece in self.pieces if not piece.is_known)

    def joined(self, other: Text) -> Text:
        return Text(self.line, self.pieces + other.pieces, self.defaults + other.defaults, self.through | other.through)

    def with_text(self, text: str) -> Text:
        return replace(self, pieces=(Piece(text),))

    def split(self) -> list[Text]:
        """The words between blanks; what only the shell knows is one word, whatever blanks stand in its source."""
        words: list[list[Piece]] = [[]]
        for piece in self.pieces:
            if not piece.is_known:
                words[-1].append(piece)
                continue
            first, *others = _between_blanks(piece.text)
            for place, part in enumerate((first, *others)):
                if place:
                    words.append([])
                if part:
                    words[-1].append(Piece(part))
        return [replace(self, pieces=tuple(word)) for word in words if word]


def known(text: str, line: int) -> Text:
    """A word that is what it says."""
    return Text(line, (Piece(text),))


def unknown(source: str, line: int) -> Text:
    """A word that only the shell knows, as it stands in the script."""
    return Text(line, (Piece(source, is_known=False),))


def together(texts: Iterable[Text], line: int) -> Text:
    """Words with a blank between them, as one."""
    found = Text(line)
    for place, text in enumerate(texts):
        found = found.joined(known(" ", line)).joined(text) if place else found.joined(text)
    return found


def _between_blanks(text: str) -> list[str]:
    """Parts of a text; an empty one at an end where the text begins or ends with a blank."""
    parts = text.split()
    if not parts:
        return ["", ""] if text else [""]
    before = [""] if text[0].isspace() else []
    after = [""] if text[-1].isspace() else []
    return [*before, *parts, *after]
