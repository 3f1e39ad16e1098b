"""The pages that a user reads, as data: their fenced blocks and the commands in them, in the order of reading."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("README*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("examples/*/README*")),
]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"`([\w./-]+\.(?:toml|py|jsonl))`")
_SPAN = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Block:
    """A fenced block, and the file that the line above it calls it."""

    page: Path
    offset: int
    language: str
    code: str
    file: str | None

    @property
    def where(self):
        return place(self.page, self.offset)


@dataclass(frozen=True)
class Command:
    """A line `strop COMMAND ...` in a block of bash or between backticks."""

    page: Path
    offset: int
    words: tuple[str, ...]  # without strop

    @property
    def where(self):
        return f"{place(self.page, self.offset)}: strop {shlex.join(self.words)}"


def name_of(page):
    return str(page.relative_to(ROOT))


def place(page, offset):
    """File and line of a position in a page."""
    return f"{name_of(page)}:{page.read_text(encoding='utf-8').count(chr(10), 0, offset) + 1}"


def blocks(page):
    """The fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        files = _FILE.findall(text[: match.start()].rstrip("\n").rpartition("\n")[2])
        found.append(Block(page, match.start(), match[1], match[2], files[-1] if files else None))
    return found


def blocks_of(language):
    """Of all pages."""
    return [block for page in PAGES for block in blocks(page) if block.language == language]


def prose(page):
    """A page with its blocks blanked out: every position stays."""
    return _FENCE.sub(lambda match: " " * len(match[0]), page.read_text(encoding="utf-8"))


def spans(page):
    """(offset, text) of what stands between single backticks."""
    return [(match.start(), match[1]) for match in _SPAN.finditer(prose(page))]


def code_lines(page):
    """(offset, line) of everything that a page shows as something to type."""
    found = list(spans(page))
    for block in blocks(page):
        if block.language == "bash":
            offset = block.offset
            for line in block.code.splitlines():
                offset += 1
                found.append((offset, line))
    return sorted(found)


def commands(page):
    """Every command of strop that a page tells its reader to type. `strop sft` alone only names a command."""
    split = [(offset, shlex.split(line, comments=True)) for offset, line in code_lines(page) if line[:6] == "strop "]
    return [
        Command(page, offset, tuple(words[1:]))
        for offset, words in split
        if len(words) > 2 or words == ["strop", "doctor"]
    ]


def starting_page(page):
    """Getting started in the language of a page: what the other pages go on from."""
    is_chinese = "zh" in page.parts or page.name == "README.zh.md"
    return ROOT / "docs" / ("zh" if is_chinese else "en") / "getting-started.md"
