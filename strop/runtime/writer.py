"""Writing a checkpoint while the run goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable


class CheckpointWriter:
    """Writes checkpoints in a thread, one at a time. What it writes must be a copy that nothing else changes.

    A write that failed raises its error here, in the thread of the run: when the next one starts, or when `check` or `wait`
    is called.

    >>> writer = CheckpointWriter()
    >>> writer.start(3, lambda: None)
    >>> writer.wait()
    >>> writer.saved_step
    3
    """

    def __init__(self) -> None:
        self.saved_step = -1  # of the newest checkpoint that is written, or being written
        self._before = -1  # the same without the one that is being written
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, step: int, write: Callable[[], object]) -> None:
        """Write the checkpoint of a step, once the one before it is there."""
        self.wait()

        def work() -> None:
            try:
                write()
            except BaseException as error:  # noqa: BLE001 - raised again in the thread of the run
                self._error = error

        self._before, self.saved_step = self.saved_step, step
        # A daemon: a second Ctrl-C ends the process at once, and what is half written is no checkpoint.
        self._thread = threading.Thread(target=work, name=f"checkpoint of step {step}", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of the last write, if it has failed by now."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Until the last write is done; raises its error, once."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            self.saved_step = self._before
            raise error
