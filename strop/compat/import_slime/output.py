"""Writes a config that was not there before."""

from __future__ import annotations

from pathlib import Path

from strop.types import UserError


def write_new(path: Path, text: str, *, force: bool) -> None:
    """Write a file.

    Raises:
        UserError: it is there already and force is not set, or it cannot be written.
    """
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} is there already. Name another file with -o, or replace it with --force.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from None
