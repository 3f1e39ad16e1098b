"""Writes docs/en/options.md and docs/zh/options.md from the options classes; with --check says where they are behind.

Chinese descriptions stand in tools/options_zh.toml, by the English ones.
"""

from __future__ import annotations

import sys
import tomllib
from itertools import groupby
from pathlib import Path

from strop.config import SFTConfig, TrainConfig
from strop.config.reference import Entry, entries

ROOT = Path(__file__).parents[1]
CHINESE = ROOT / "tools/options_zh.toml"
HEADS = {
    "en": "# Options\n\nEvery option of a config, by table. `strop help WORDS` finds them on the command line;\n"
    "`strop schema` prints a JSON Schema with which editors complete and check a config.\n"
    "No number may be above 1e30 in size: runs compute in float32.\n",
    "zh": "# 选项\n\n配置的所有选项,按表排列。命令行上用 `strop help WORDS` 查找;\n"
    "`strop schema` 打印 JSON Schema,供编辑器补全和检查配置。\n"
    "任何数的大小都不得超过 1e30:运行以 float32 计算。\n",
}
TITLES = {"en": ("option", "takes", "default", "meaning"), "zh": ("选项", "取值", "默认", "含义")}
COMMANDS = {"en": "of `{}`", "zh": "`{}` 的选项"}


def page(language: str, types: dict[str, str], words: dict[str, str]) -> str:
    """The page in one language, with its words for types and descriptions."""
    parts = [HEADS[language]]
    for command, root in (("strop train", TrainConfig), ("strop sft", SFTConfig)):
        where = COMMANDS[language].format(command)
        parts.append(f"## {'Options ' if language == 'en' else ''}{where}\n")
        for (table, kind), group in groupby(entries(root), key=lambda e: (e.table, e.kind)):
            name = f"[{table}]" if table else ("top level" if language == "en" else "顶层")
            parts.append(f"### {name}{f', kind = {kind}' if kind else ''}\n")
            titles = TITLES[language]
            parts.append(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
            parts += [_row(entry, types, words) for entry in group]
            parts.append("")
    return "\n".join(parts)


def _row(entry: Entry, types: dict[str, str], words: dict[str, str]) -> str:
    takes, default = entry.takes.replace(" | ", ", "), f"`{entry.default}`" if entry.default else "must be given"
    for english, other in types.items():
        takes, default = takes.replace(english, other), default.replace(english, other)
    meaning = words.get(entry.description, entry.description)
    cells = (f"`{entry.path.rpartition('.')[2]}`", takes, default, meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main() -> None:
    found = tomllib.loads(CHINESE.read_text(encoding="utf-8"))
    types, chinese = found["types"], found["words"]
    descriptions = {e.description for root in (TrainConfig, SFTConfig) for e in entries(root)}
    missing = sorted(descriptions - set(chinese))
    stale = sorted(set(chinese) - descriptions)
    if missing or stale:
        sys.exit(f"{CHINESE.relative_to(ROOT)}: without Chinese {missing}; no option has {stale}.")
    for language in ("en", "zh"):
        path, text = (
            ROOT / f"docs/{language}/options.md",
            page(language, *((types, chinese) if language == "zh" else ({}, {}))),
        )
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path.relative_to(ROOT)} is not what the options are: run tools/options_page.py.")


if __name__ == "__main__":
    main()
