"""Reads JSONL and Parquet files row by row, and says where a row stands when something is wrong with it."""

from __future__ import annotations

import codecs
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from strop.types import DataError


class Row(NamedTuple):
    """One row of a file."""

    where: str  # the file and the physical line or row, as error messages begin
    values: dict[str, Any]

    def column(self, key: str, option: str) -> Any:
        """The value of a column that must be there; `option` is the one that names it."""
        if key not in self.values:
            there = ", ".join(map(repr, self.values)) or "none"
            raise DataError(f"{self.where}: has no key {key!r}, which {option} names. Its keys: {there}.")
        return self.values[key]


# How files begin that are often taken for JSONL, and what to say of them.
_OTHER_FORMATS = {
    b"\x1f\x8b": "is compressed with gzip. Unpack it first",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd. Unpack it first",
    b"PK\x03\x04": "is a zip archive. Unpack it first",
    b"PAR1": 'is a Parquet file. Set kind = "parquet"',
    codecs.BOM_UTF16_LE: "is text in UTF-16. Save it as UTF-8",
    codecs.BOM_UTF16_BE: "is text in UTF-16. Save it as UTF-8",
}


class JSONLRows(NamedTuple):
    """What `read_jsonl` found."""

    rows: list[Row]
    num_skipped: int


class _BadLine(Exception):
    """A line that is not a row; `column` counts characters from 1 where it is known."""

    def __init__(self, reason: str, column: int | None = None) -> None:
        super().__init__(reason)
        self.reason, self.column = reason, column


def read_jsonl(path: str | Path, *, skip_bad_lines: bool) -> JSONLRows:
    """Read a file with one JSON object a line.

    Lines end at a line feed and are counted from 1. Blank lines are passed over but counted; a byte order mark at the
    beginning of the file is accepted; the last line needs no end.

    Args:
        path: the file.
        skip_bad_lines: leave broken lines out and count them; otherwise the first one is an error.

    Returns:
        The rows in the order of the file, and how many broken lines were left out.

    Raises:
        DataError: "FILE, line N, column C: reason" for a line that is not a JSON object in UTF-8; the file cannot be
            read, or no row is left.
    """
    rows: list[Row] = []
    num_skipped = 0
    try:
        with _existing(path).open("rb") as lines:
            _refuse_other_formats(path, lines.peek(4))
            for number, line in enumerate(lines, start=1):
                raw = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if not raw.strip():
                    continue
                try:
                    rows.append(Row(f"{path}, line {number}", _parse_line(raw.rstrip(b"\r\n"))))
                except _BadLine as bad:
                    if not skip_bad_lines:
                        column = "" if bad.column is None else f", column {bad.column}"
                        raise DataError(f"{path}, line {number}{column}: {bad.reason}.") from bad
                    num_skipped += 1
    except OSError as error:
        raise DataError(f"{path}: cannot be read, {error.strerror or error}.") from error
    if not rows:
        raise DataError(f"{path}: has no rows" + (f", all {num_skipped} lines are broken." if num_skipped else "."))
    return JSONLRows(rows, num_skipped)


def read_parquet(path: str | Path) -> list[Row]:
    """Read a Parquet file; rows are counted from 0.

    Raises:
        DataError: the file is not Parquet, cannot be read, or has no rows.
    """
    import pyarrow
    from pyarrow import parquet

    existing = _existing(path)
    try:
        with parquet.ParquetFile(existing) as file:
            names = file.schema_arrow.names
            values = file.read().to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: what has no Python value
        raise DataError(f"{path}: cannot be read as Parquet, {error}") from error
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path}: has two columns {twice!r}.")
    if not values:
        raise DataError(f"{path}: has no rows.")
    return [Row(f"{path}, row {number}", row) for number, row in enumerate(values)]


def _refuse_other_formats(path: str | Path, start: bytes) -> None:
    for mark, sentence in _OTHER_FORMATS.items():
        if start.startswith(mark):
            raise DataError(f"{path}: {sentence}.")


def _existing(path: str | Path) -> Path:
    file = Path(path)
    if not str(path).strip():
        raise DataError(f"the path of a data file must be given, got {str(path)!r}.")
    if file.is_dir():
        raise DataError(f"{path}: is a folder, not a file.")
    if not file.exists():
        raise DataError(f"{path}: there is no such file. Relative paths are taken from {Path.cwd()}.")
    return file


def _parse_line(raw: bytes) -> dict[str, Any]:
    try:
        line = raw.decode()
    except UnicodeDecodeError as error:
        column = len(raw[: error.start].decode()) + 1
        raise _BadLine(f"not valid UTF-8, byte 0x{raw[error.start]:02x}", column) from error
    try:
        value = json.loads(line, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_object)
        if "\\u" in line:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise _BadLine(f"not valid JSON, {error.msg}", error.pos + 1) from error
    except RecursionError as error:
        raise _BadLine("nested too deeply") from error
    except UnicodeEncodeError as error:
        raise _BadLine("a \\u escape is half of a surrogate pair and stands for no character") from error
    except ValueError as error:  # an integer of more digits than Python reads
        raise _BadLine(f"not usable, {error}") from error
    if not isinstance(value, dict):
        raise _BadLine(f"must be a JSON object, got {_kind_of(value)}")
    return value


def _refuse_constant(name: str) -> Any:
    raise _BadLine(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _BadLine(f"{text[:40]} is larger than any 64-bit number")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _BadLine(f"the key {twice!r} stands there twice")
    return values


def _kind_of(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
