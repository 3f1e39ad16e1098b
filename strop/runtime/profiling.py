"""Traces of steps by torch's profiler, in the run folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from strop.runtime.session import Session

_ROWS = 40  # of the table of operations


class StepProfiler:
    """Traces the first `run.profile_steps` steps after the one that warms up: the first step of this process, unless it is the
    only one.

    For each of them `profile/` in the run folder gets `step_000002.json.gz`, a trace for chrome://tracing or Perfetto in which
    the step's phases have names, and `step_000002.txt`, the operations that took most time. A step that is not made leaves
    none.

    Args:
        session: before its first step.
    """

    def __init__(self, session: Session) -> None:
        self._session, run = session, session.config.run
        first = session.step + 1 if run.num_steps - session.step > 1 else session.step
        self._traced = range(first, first + run.profile_steps)

    @contextmanager
    def next_step(self) -> Iterator[None]:
        """Around a step."""
        session = self._session
        step = session.step
        if step not in self._traced:
            yield
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # torch would tell of the profiler's stages on the terminal
        has_gpu = torch.cuda.is_available()
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])]
        session.console.span = record_function
        try:
            with profile(activities=kinds) as seen:
                yield
        finally:
            session.console.span = nullcontext
        if session.step <= step:  # it was not made, or steps were taken back
            return
        session.folder.profile.mkdir(exist_ok=True)
        name = f"step_{session.step:06d}"
        seen.export_chrome_trace(str(session.folder.profile / f"{name}.json.gz"))
        table = seen.key_averages().table(
            sort_by="self_cuda_time_total" if has_gpu else "self_cpu_time_total", row_limit=_ROWS
        )
        (session.folder.profile / f"{name}.txt").write_text(table, encoding="utf-8")
