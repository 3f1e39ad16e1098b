"""A TOML file as values and as text; every way in which reading it can fail names the file, and line and column where there
is one."""

from __future__ import annotations

import codecs
import re
import tomllib
from pathlib import Path
from typing import Any

from strop.config.lines import broken_statement
from strop.types import ConfigError


def read_toml(path: Path) -> tuple[dict[str, Any], str]:
    """The values of a file, and its text.

    Raises:
        ConfigError: there is no such file, it is no text in UTF-8, or it is no TOML.
    """
    text = _text(path)
    try:
        return tomllib.loads(text), text
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply.") from None
    except ValueError as error:  # TOMLDecodeError, and numbers of thousands of digits
        reason, place = _reason(error, text), _place(error, text)
        raise ConfigError(f"{path}, {place}: is not valid TOML: {reason}.") from None


def _text(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        name = str(path) if str(path).isprintable() else repr(str(path))
        raise ConfigError(f"{name}: there is no such config file.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder. Name a config file{_in_it(path)}.") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL byte
        raise ConfigError(f"{str(path)!r}: cannot be read: {error}.") from None
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in raw:
        raise ConfigError(f"{path}: is not text in UTF-8 (UTF-16, or no text at all). Save it as UTF-8.")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8-sig")
        line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
        raise ConfigError(
            f"{path}, line {line}, column {column}: is not text in UTF-8, byte 0x{raw[error.start]:02x}. Save it as UTF-8."
        ) from None


def _in_it(folder: Path) -> str:
    inside = folder / "config.toml"
    return f", such as {inside}" if inside.is_file() else ""


_WHERE = re.compile(r" \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")


def _reason(error: ValueError, text: str) -> str:
    reason = _WHERE.sub("", str(error)).rstrip(".")
    if reason != "Cannot overwrite a value":
        return reason
    statement = text.split("\n")[broken_statement(text).line - 1]
    return f"{statement.partition('=')[0].strip()} is set already"


def _place(error: ValueError, text: str) -> str:
    """Where the parser stopped; and where the statement begins, if that is another line, as with a bracket left open."""
    found, begins = _WHERE.search(str(error)), broken_statement(text)
    if found is None or found["line"] is None:
        return f"line {begins.line}, column {begins.column}"
    place = f"line {found['line']}, column {found['column']}"
    return place if int(found["line"]) == begins.line else f"{place} (in what begins in line {begins.line})"
