"""The commands. Each imports what it needs when it is called, so that --help is there at once."""

import os

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # spinning threads starve each other on a busy machine; before torch

from strop.cli import options, plans, runs, scores, slime
from strop.cli.entry import main
from strop.cli.shared import cli

__all__ = ["cli", "main", "options", "plans", "runs", "scores", "slime"]
