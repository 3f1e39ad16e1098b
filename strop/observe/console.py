"""What a person sees while a run goes on: the phase it is in, and one line per step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Console(Protocol):
    """Where a run reports to; `QuietConsole` is the one that says nothing."""

    phase_seconds: dict[str, float]
    span: Callable[[str], AbstractContextManager[Any]]  # is around each phase

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def phase(self, name: str, total: int, *, is_idle: bool = False) -> object: ...

    def advance(self, done: int) -> None: ...

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None: ...


class QuietConsole:
    """Times phases, prints nothing."""

    def __init__(self) -> None:
        self.phase_seconds: dict[str, float] = {}
        self.span: Callable[[str], AbstractContextManager[Any]] = nullcontext

    def note(self, text: str) -> None:
        """A line for the reader."""

    def warn(self, text: str) -> None:
        """A line that should not be missed."""

    @contextmanager
    def phase(self, name: str, total: int, *, is_idle: bool = False) -> Iterator[None]:
        """Time a phase of the step; `total` is what `advance` counts up to. The time of one in which this process only waits
        for others is counted as "idle", too."""
        start = time.perf_counter()
        try:
            with self.span(name):
                yield
        finally:
            for counted in (name, "idle") if is_idle else (name,):
                self.phase_seconds[counted] = self.phase_seconds.get(counted, 0.0) + time.perf_counter() - start

    def advance(self, done: int) -> None:
        """`done` of the phase's total are there now."""

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """A step has ended; clears the phase times."""
        self.phase_seconds = {}


class TerminalConsole(QuietConsole):
    """Live progress on a terminal; in a file or pipe only the lines."""

    def __init__(self, *, title: str, to_stderr: bool = False) -> None:
        super().__init__()
        self._console = RichConsole(stderr=to_stderr, highlight=False, soft_wrap=True)
        self._title = title
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = ""
        self._shown = ("", 0)  # phase and total of the bar

    def note(self, text: str) -> None:
        self._console.print(escape(text))

    def warn(self, text: str) -> None:
        self._console.print(f"[yellow]warning:[/yellow] {escape(text)}")

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show the live line for as long as this lasts."""
        if not self._console.is_terminal:
            yield
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(24),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console, transient=True) as self._progress:
            self._task = self._progress.add_task(self._title, total=None)
            try:
                yield
            finally:
                self._progress = None

    @contextmanager
    def phase(self, name: str, total: int, *, is_idle: bool = False) -> Iterator[None]:
        if self._progress is not None and self._task is not None:
            description = f"{name:<10}{self._last_line}"
            if self._shown == (name, total):  # the same bar goes on, and so does its clock
                self._progress.update(self._task, description=description)
            else:
                self._progress.reset(self._task, total=total, description=description)
            self._shown = (name, total)
        with super().phase(name, total, is_idle=is_idle):
            yield

    def advance(self, done: int) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done)

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        width = len(str(num_steps))
        parts = [_cell(*column, metrics) for column in _COLUMNS if column[1] in metrics]
        parts += [f"{label} {metrics[name]:g}" for label, name in _COUNTS if metrics.get(name, 0) > 0]
        times = " ".join(
            f"{name} {metrics[f'seconds/{name}']:.1f}s" for name in _PHASES if f"seconds/{name}" in metrics
        )
        seen = [_cell(*column, metrics) for column in _COLUMNS if column[1] in _LIVE and column[1] in metrics]
        self._last_line = "  ".join([f"step {step}/{num_steps}", *seen])
        self._console.print(f"step {step:>{width}}/{num_steps}  {'  '.join(parts)}  | {times}")
        super().step(step, num_steps, metrics)


def _cell(label: str, name: str, form: str, metrics: Mapping[str, float]) -> str:
    value = metrics[name]
    return f"{label} {value:{form}}" if abs(value) < 1e6 else f"{label} {value:.3g}"  # 1e300 has 300 digits


# label, metric, format: the columns of a step's line, as far as the step has them
_COLUMNS = (
    ("reward", "reward", ".3f"),
    ("loss", "loss", "+.4f"),
    ("nll", "nll", ".4f"),
    ("val", "validation/loss", ".4f"),
    ("len", "response_tokens", ".1f"),
    ("cut", "truncated", ".0%"),
    ("rkl", "reverse_kl", "+.4f"),
    ("stale", "staleness", ".1f"),
    ("entropy", "entropy", ".3f"),
    ("clip", "clip_fraction", ".1%"),
    ("grad", "grad_norm", ".3f"),
    ("vloss", "value_loss", ".4f"),
    ("vgrad", "critic_grad_norm", ".3f"),
    ("gap", "logprob_gap", ".0e"),
    ("tok/s", "tokens_per_second", ",.0f"),
)
_COUNTS = (  # shown where there are any
    ("no-op updates", "skipped_steps"),
    ("scorer errors", "reward/num_errors"),
    ("timeouts", "reward/num_timeouts"),
    ("crashes", "reward/num_crashes"),
    ("out of memory", "reward/num_out_of_memory"),
    ("too many processes", "reward/num_too_many_processes"),
    ("left out", "reward/num_excluded"),
    ("groups of one", "groups_of_one"),
    ("rounds", "rounds"),
    ("equal", "dropped/equal_rewards"),
    ("filtered", "dropped/group_filter"),
    ("waiting", "waiting_groups"),
    ("skipped", "guard/skipped"),
    ("taken back", "guard/rollbacks"),
)
_LIVE = ("reward", "reverse_kl", "nll", "validation/loss", "tokens_per_second")  # beside the bar
_PHASES = ("wait", "sample", "score", "logprobs", "teacher", "train", "weights", "eval", "validation", "checkpoint")
