"""Processes that strop starts end with it, however it ends."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from processes import is_running

from strop.rewards.tied import TiedProcess

# It takes back what Linux would do at its parent's death, starts another process, says who they are, and goes on for ever.
STUBBORN = """
import ctypes, os, signal, sys, time
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
child = os.fork()
if child:
    os.write(1, f"{os.getpid()} {child}\\n".encode())
while True:
    time.sleep(60)
"""
PARENT = f"""
import sys, time
from strop.rewards.tied import TiedProcess
process = TiedProcess([sys.executable, "-I", "-S", "-c", {STUBBORN!r}])
time.sleep(60)
"""


def all_end(pids, limit_s=60.0):
    until = time.monotonic() + limit_s
    while any(map(is_running, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(is_running, pids))


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="tells processes by /proc")
def test_a_process_and_what_it_started_end_when_their_parent_is_killed_even_without_the_help_of_linux():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait(60)
        parent.stdout.close()
    assert all_end(pids)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="tells processes by /proc")
def test_a_process_that_ended_by_itself_leaves_neither_its_children_nor_its_watcher():
    program = "import os, time; pid = os.fork()\nif pid: print(os.getpid(), pid)\nelse: time.sleep(60)"
    process = TiedProcess([sys.executable, "-I", "-S", "-c", program], stdout=subprocess.PIPE)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert process.wait(60) == 0
    members = _members(pids[0])
    assert pids[1] in members
    assert len(members) == 2  # with the watcher
    process.end()
    assert all_end(members)


def _members(group):
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as stat:
                if int(stat.read().rpartition(")")[2].split()[2]) == group and is_running(name):
                    found.append(int(name))
        except OSError:
            pass
    return found


def test_the_command_has_its_exit_code_its_pipes_and_no_child_that_it_did_not_start():
    program = "import os\ntry: os.wait()\nexcept ChildProcessError: print(input())\nraise SystemExit(7)"
    pipe = subprocess.PIPE
    process = TiedProcess([sys.executable, "-I", "-S", "-c", program], stdin=pipe, stdout=pipe)
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    assert process.stdout.read() == b"hello\n"  # to its end, which nobody else holds open
    assert process.wait(60) == 7
    process.end()


def test_a_process_outlives_the_thread_that_started_it():
    """Linux can end a process with its parent, but counts the thread as the parent."""
    program, pipe, made = "print(input()); input()", subprocess.PIPE, []
    command = [sys.executable, "-I", "-S", "-u", "-c", program]
    thread = threading.Thread(target=lambda: made.append(TiedProcess(command, stdin=pipe, stdout=pipe)))
    thread.start()
    thread.join()
    assert made[0].ask("hello", 60) == b"hello\n"
    time.sleep(0.1)
    assert made[0].poll() is None
    made[0].end()
