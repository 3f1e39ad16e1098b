"""Puts the words of a shell script together to commands, branches, loops and functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from strop.compat.import_slime.words import Array, Mark, Token, Word
from strop.types import UserError


@dataclass
class Node:
    """Something that runs, its line, and the mark before what follows: && or ||, else nothing."""

    line: int
    joined: str = field(default="", kw_only=True)


@dataclass
class Command(Node):
    """Words and assignments in a row."""

    words: list[Word | Array]
    is_negated: bool = False


@dataclass
class Group(Node):
    """{ ... } or ( ... )."""

    body: list[Node]


@dataclass
class Branches(Node):
    """if, elif and else: what is asked, None for else, and what runs then."""

    arms: list[tuple[list[Node] | None, list[Node]]]


@dataclass
class Choice(Node):
    """case: patterns, and what runs where one fits."""

    word: Word
    arms: list[tuple[list[Word], list[Node]]]


@dataclass
class Loop(Node):
    """for, with a variable and its words, or while, with what is asked; until has neither."""

    variable: str
    words: list[Word] | None
    condition: list[Node]
    body: list[Node]


@dataclass
class Function(Node):
    """NAME() { ... }."""

    name: str
    body: Node


def read_blocks(tokens: Sequence[Token], where: str) -> list[Node]:
    """The commands of a script, from its words and marks.

    Args:
        tokens: words and marks.
        where: the script's name, for messages.

    Raises:
        UserError: an if, case, loop, { or ( is opened and never closed; file and line are named.
    """
    return _Parser(tokens, where).block(frozenset())


class _Parser:
    """One pass over the tokens; `place` is the next."""

    def __init__(self, tokens: Sequence[Token], where: str) -> None:
        self.tokens, self.where, self.place = tokens, where, 0

    @property
    def next(self) -> Token | None:
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    def _is(self, *texts: str) -> bool:
        """Whether the next token is one of these keywords or marks."""
        token = self.next
        return isinstance(token, Mark | Word) and (token.text if isinstance(token, Mark) else token.keyword) in texts

    def _take(self, opened: str, line: int, *texts: str) -> str:
        """The next of these keywords or marks, behind ends of lines; what was opened is named where there is none."""
        while self._is("\n", ";"):
            self.place += 1
        token = self.next
        if not self._is(*texts) or not isinstance(token, Mark | Word):
            raise UserError(f"{self.where}, line {line}: {opened} is opened and never closed.")
        self.place += 1
        return token.text if isinstance(token, Mark) else token.keyword

    def block(self, ends: frozenset[str]) -> list[Node]:
        """Commands up to one of these keywords or marks, which is left for the caller."""
        found: list[Node] = []
        while self.next is not None and not self._is(*ends):
            if isinstance(self.next, Mark) and self.next.text != "(":
                self.place += 1  # the end of a line, or what belongs to nothing
                continue
            node = self._command()
            if self._is("&&", "||"):
                node.joined = str(self._take("", node.line, "&&", "||"))
            found.append(node)
        return found

    def _command(self) -> Node:
        token = self.next
        assert token is not None
        keyword = token.text if isinstance(token, Mark) else token.keyword if isinstance(token, Word) else ""
        compound = {
            "if": self._if,
            "case": self._case,
            "for": self._for,
            "select": self._for,
            "while": self._while,
            "until": self._while,
            "{": self._group,
            "(": self._group,
            "function": self._function,
        }.get(keyword)
        if compound is None:
            return self._simple(token.line)
        self.place += 1
        return compound(token.line, keyword)

    def _if(self, line: int, keyword: str) -> Node:
        arms: list[tuple[list[Node] | None, list[Node]]] = []
        while keyword in ("if", "elif"):
            condition = self.block(frozenset(("then", "fi")))
            self._take("if", line, "then")
            arms.append((condition, self.block(frozenset(("elif", "else", "fi")))))
            keyword = self._take("if", line, "elif", "else", "fi")
        if keyword == "else":
            arms.append((None, self.block(frozenset(("fi",)))))
            self._take("if", line, "fi")
        return Branches(line, arms)

    def _case(self, line: int, keyword: str) -> Node:
        word = self.next
        if not isinstance(word, Word):
            raise UserError(f"{self.where}, line {line}: case has no word.")
        self.place += 1
        self._take(keyword, line, "in")
        arms: list[tuple[list[Word], list[Node]]] = []
        while not self._is("esac"):
            patterns: list[Word] = []
            while self.next is not None and not self._is(")"):
                if isinstance(self.next, Word):
                    patterns.append(self.next)
                self.place += 1
                if self._is("esac") and not patterns:
                    break
            if self._is("esac"):
                break
            self._take(keyword, line, ")")
            arms.append((patterns, self.block(frozenset((";;", "esac")))))
        self._take(keyword, line, "esac")
        return Choice(line, word, arms)

    def _for(self, line: int, keyword: str) -> Node:
        words: list[Word] = []
        while isinstance(self.next, Word) and not self._is("do"):
            words.append(self.next)
            self.place += 1
        is_list = len(words) > 1 and words[1].keyword == "in"
        body = self._loop_body(line, keyword)
        return Loop(line, words[0].plain if words else "", words[2:] if is_list else None, [], body)

    def _while(self, line: int, keyword: str) -> Node:
        condition = self.block(frozenset(("do", "done")))
        body = self._loop_body(line, keyword)
        return Loop(line, "", None, condition if keyword == "while" else [], body)

    def _loop_body(self, line: int, keyword: str) -> list[Node]:
        self._take(keyword, line, "do")
        body = self.block(frozenset(("done",)))
        self._take(keyword, line, "done")
        return body

    def _group(self, line: int, keyword: str) -> Node:
        end = "}" if keyword == "{" else ")"
        body = self.block(frozenset((end,)))
        self._take(keyword, line, end)
        return Group(line, body)

    def _function(self, line: int, _: str) -> Node:
        """function NAME { ... }, with or without ()."""
        name = self.next
        if not isinstance(name, Word):
            raise UserError(f"{self.where}, line {line}: function has no name.")
        self.place += 1
        return self._defined(str(name), line)

    def _defined(self, name: str, line: int) -> Node:
        while self._is("(", ")", "\n"):
            self.place += 1
        if self.next is None or isinstance(self.next, Mark):
            raise UserError(f"{self.where}, line {line}: the function {name} has no body.")
        return Function(line, name, self._command())

    def _simple(self, line: int) -> Node:
        words: list[Word | Array] = []
        is_negated = False
        while self.next is not None and not (isinstance(self.next, Mark) and self.next.text != "("):
            if isinstance(self.next, Mark):
                first = words[0] if words else None
                following = self.tokens[self.place + 1] if self.place + 1 < len(self.tokens) else None
                if (
                    len(words) == 1
                    and isinstance(first, Word)
                    and isinstance(following, Mark)
                    and following.text == ")"
                ):
                    return self._defined(str(first), line)
            elif not words and self._is("!"):
                is_negated = not is_negated
            else:
                words.append(self.next)
            self.place += 1
        return Command(line, words, is_negated)
