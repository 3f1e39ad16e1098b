"""Keep the English and the Chinese documentation in step.

Both languages have the same pages; each pair has the same levels of headings, the same code blocks, the same tables by
size, and the same numbers in its prose. Relative links lead somewhere.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![a-zA-Z_.\d])(?:\d*\.)?\d+(?![a-zA-Z_\d]|\.\d)")
COMMENT = re.compile(r"\s+# .*")
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")


def pairs() -> list[tuple[Path, Path]]:
    """Every English page with its Chinese one, whether it exists or not."""
    english = {p.relative_to("docs/en") for p in Path("docs/en").rglob("*.md")}
    chinese = {p.relative_to("docs/zh") for p in Path("docs/zh").rglob("*.md")}
    pages = [(Path("docs/en") / name, Path("docs/zh") / name) for name in sorted(english | chinese)]
    return [(Path("README.md"), Path("README.zh.md")), *pages]


def compare(english: Path, chinese: Path) -> list[str]:
    """What differs between two pages that should say the same."""
    missing = [str(p) for p in (english, chinese) if not p.exists()]
    if missing:
        return [f"{missing[0]} is missing"]
    first, second = english.read_text(encoding="utf-8"), chinese.read_text(encoding="utf-8")
    found = []
    for what, parts in (("headings", headings), ("code blocks", code), ("table rows", tables), ("numbers", numbers)):
        a, b = parts(first), parts(second)
        if a != b:
            where = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            found.append(f"{chinese}: {what} differ from {english} at number {where + 1} ({len(a)} and {len(b)})")
    return found


def headings(text: str) -> list[int]:
    return [len(m) for m in re.findall(r"^(#+) ", FENCE.sub("", text), re.MULTILINE)]


def code(text: str) -> list[str]:
    """Code blocks to the letter. What may be translated: comments of shell commands, and in text blocks (trees of folders,
    formulas) the words after two spaces."""
    return ["\n".join(_untranslated(line, block) for line in block.splitlines()) for block in FENCE.findall(text)]


def _untranslated(line: str, block: str) -> str:
    if block.startswith("```bash"):
        return COMMENT.sub("", line)
    return line.strip().split("  ")[0] if block.startswith("```text") else line


def tables(text: str) -> list[int]:
    return [line.count("|") for line in FENCE.sub("", text).splitlines() if line.startswith("|")]


def numbers(text: str) -> list[str]:
    """Numbers in prose and tables, sorted: the order of words differs between languages."""
    return sorted(NUMBER.findall(LINK.sub("", FENCE.sub("", text))))


def dead_links(page: Path) -> list[str]:
    targets = (t for t in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in t)
    return [f"{page}: there is no {target}" for target in targets if not (page.parent / target).exists()]


def main() -> None:
    problems = [problem for pair in pairs() for problem in compare(*pair)]
    problems += [link for pair in pairs() for page in pair if page.exists() for link in dead_links(page)]
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
