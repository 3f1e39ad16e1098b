"""Processes that tests have started."""

from pathlib import Path


def is_running(pid):
    """A zombie has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
