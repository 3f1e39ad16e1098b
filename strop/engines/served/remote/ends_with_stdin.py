"""Runs a module as a program, and ends it with all that it started once nobody holds the other end of its standard input:
python ends_with_stdin.py MODULE ARGUMENTS. Whoever starts it makes it the first of a group of processes of its own."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def _end_with_parent() -> None:
    while os.read(0, 1024):  # not by sys.stdin, whose lock would be held when the program ends by itself
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
