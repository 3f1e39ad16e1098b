"""Keep the workflow's matrix equal to what the tests declare.

Collects the tests, reads how many GPUs each needs, and compares with the lines between `# matrix` and `# end of matrix`
in .github/workflows/test.yml. --write writes them; without it a difference is an error.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections import Counter
from pathlib import Path

import pytest

WORKFLOW = Path(".github/workflows/test.yml")
BEGIN, END = "          # matrix: made by tools/workflow_matrix.py --write\n", "          # end of matrix\n"


class _Collector:
    """A pytest plugin that counts tests by the GPUs they need."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            marker = item.get_closest_marker("gpus")
            self.counts[int(marker.args[0]) if marker else 0] += 1


def declared() -> list[int]:
    """The numbers of GPUs that tests ask for, smallest first."""
    collector = _Collector()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = pytest.main(["--collect-only", "-q"], plugins=[collector])
    if code != 0:
        sys.exit(f"{said.getvalue()}\nthe tests cannot be collected (pytest exit code {int(code)})")
    return sorted(collector.counts)


def rows(gpus: list[int]) -> str:
    """The matrix as YAML lines."""
    runner = {0: "ubuntu-latest"}
    return "".join(f"          - {{gpus: {n}, runner: {runner.get(n, f'gpu-{n}')}}}\n" for n in gpus)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the matrix into the workflow")
    arguments = parser.parse_args()
    text = WORKFLOW.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    written, _, after = rest.partition(END)
    wanted = rows(declared())
    if arguments.write:
        WORKFLOW.write_text(before + BEGIN + wanted + END + after, encoding="utf-8")
    elif written != wanted:
        sys.exit(
            f"{WORKFLOW}: its matrix is not what the tests declare:\n{wanted}Run tools/workflow_matrix.py --write."
        )


if __name__ == "__main__":
    main()
