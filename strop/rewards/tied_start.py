"""A program that becomes another one, which ends when the process that started it is gone, however that ended.

python tied_start.py LIFE COMMAND...: LIFE is the number of the reading end of a pipe whose writing end the starter alone
holds. A watcher, a process of the command's group, waits for the end of the pipe and then kills the group: the command, and
what that has started. (Linux could kill the command by itself at its parent's death, but takes the end of the thread that
started it for that.) It imports nothing of strop, so that it starts fast.
"""

import contextlib
import os
import signal
import sys


def watch(life: int) -> None:
    """Wait for the end of the pipe; then end the whole group, and with it this process."""
    for number in map(int, os.listdir("/dev/fd")):
        if number != life:
            with contextlib.suppress(OSError):  # of the folder's own number
                os.close(number)  # the ends of pipes that others wait to see closed
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(life, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def start_watcher(life: int) -> None:
    """Not as a child of the command: it is none of those that the command may wait for."""
    between = os.fork()
    if between == 0:
        if os.fork() == 0:
            watch(life)
        os._exit(0)
    os.waitpid(between, 0)


if __name__ == "__main__":
    start_watcher(int(sys.argv[1]))
    os.close(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
