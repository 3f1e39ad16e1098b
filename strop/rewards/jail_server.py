"""A program that runs other people's Python programs, each within limits and apart from the rest as far as the system allows.

A request is a line of JSON on standard input, `{"program", "stdin", "test", limits...}`; the answer is a line of JSON on
standard output. To an empty line it says what it keeps programs from: the "network", other "processes" and "files" (no
program writes outside of its folder), where Linux allows namespaces; or that they have a "user" of their own, where root may
have none. Started with the word `limits` it keeps them from the network at most.
It imports nothing of strop, so that it starts fast.
"""

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time

POLL_S = 0.005
MAX_TEXT_BYTES = 4000  # of what a program says on standard error
NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_READ_ONLY, _PRIVATE = 0x1, 1 << 18
_NOSUID, _NODEV = 0x2, 0x4
_NOEXEC = 0x8
_DEATH_SIGNAL, _DROP_CAPABILITY, _SUBREAPER, _NO_NEW_PRIVILEGES = 1, 24, 36, 38
OTHER_USERS = 61184  # from here on: numbers that systems give to users of one service each
# What comes before a test: it runs with what the program defined. Where all went well, or an assert failed, it says so by a
# word that the program was not told.
_TEST = """
import os
os.unlink("main.py")
with open("solution.py", encoding="utf-8") as file:
    program = file.read()
names = {"__name__": "solution"}
exec(compile(program, "solution.py", "exec"), names)
word = b"right"
try:
    exec(compile(TEXT, "test", "exec"), names)
except AssertionError:
    word = b"wrong"
os.write(3, word + TOKEN)
"""


class NotAllowedError(Exception):
    """The system does not let this process do that."""


def _call(name, *given):
    libc = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_long(one) if isinstance(one, int) else one for one in given]
    if getattr(libc, name)(*words) < 0:
        raise NotAllowedError(os.strerror(ctypes.get_errno()))


def leave_network():
    """This process and all that it starts have none from here on, in namespaces in which they may make others."""
    uid, gid = os.getuid(), os.getgid()
    try:
        _call("unshare", NEW_USER | NEW_NET | NEW_IPC)
    except NotAllowedError:
        _call("unshare", NEW_NET | NEW_IPC)  # where the administrator has forbidden the first and is the one who asks
        return
    for file, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{file}", "w") as place:
            place.write(text)


def seal_files(folder, limit_bytes):
    """All files are read-only, but those of a folder, which takes up so much memory at most."""
    _call("unshare", NEW_MOUNTS)
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, _PRIVATE, 0)
    size = ctypes.sizeof(attributes)
    _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, ctypes.byref(attributes), size)
    options = f"size={limit_bytes},nr_inodes=4096,mode=700".encode()
    _call("mount", b"tmpfs", folder.encode(), b"tmpfs", _NOSUID | _NODEV, options)


def hide_processes():
    """This process is the first of its namespace, and sees those of it alone."""
    if os.getpid() != 1:
        raise NotAllowedError("it is not the first process of a namespace of its own")
    _call("unshare", NEW_MOUNTS)
    hidden = _READ_ONLY | _NOSUID | _NODEV | _NOEXEC
    try:
        _call("mount", b"proc", b"/proc", b"proc", hidden, None)
    except NotAllowedError:  # as in a container, where parts of it are hidden already: programs have none then
        _call("mount", b"tmpfs", b"/proc", b"tmpfs", hidden, None)


def in_fork(work):
    """Whether a function ends well in a process of its own."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except (NotAllowedError, OSError):
            pass
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def probe(python, isolation):
    """What programs are kept from; leaves the network where that is a part of it."""
    if sys.platform != "linux":
        return []
    has_network_apart = in_fork(leave_network)
    if isolation == "limits":
        if has_network_apart:
            leave_network()
        return ["network"] if has_network_apart else []
    folder = tempfile.mkdtemp(prefix="strop-")
    is_apart = has_network_apart and in_fork(lambda: _try_all(folder))
    os.rmdir(folder)
    if is_apart:
        leave_network()
        return ["network", "processes", "files"]
    return ["user"] if os.getuid() == 0 and in_fork(lambda: _start_as_other(python)) else []


def _try_all(folder):
    leave_network()
    seal_files(folder, 1 << 20)
    _call("unshare", NEW_PIDS)
    if not in_fork(hide_processes):
        raise NotAllowedError("it has no processes of its own")


def _start_as_other(python):
    become_other()
    os.execv(python, [python, "-S", "-c", ""])


def become_other():
    """Another user, whom nothing belongs to and who runs nothing else: programs can end no process but their own."""
    number = OTHER_USERS + os.getpid() % 4096
    os.setgroups([])
    os.setresgid(number, number, number)
    os.setresuid(number, number, number)


def run(request, kept):
    """Run one program; how it ended, and what it wrote."""
    folder = tempfile.mkdtemp(prefix="strop-")
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(told)
            _tell(tells, request, kept, folder)
        finally:  # also where nobody listens any more: it must not go on as the process that it was forked from
            os._exit(0)
    os.close(tells)
    with os.fdopen(told, "rb") as answer:
        line = answer.read()
    os.waitpid(child, 0)
    shutil.rmtree(folder, ignore_errors=True)
    return json.loads(line or '{"ended": "failed", "text": "the process that watched it ended"}')


def _tell(tells, request, kept, folder):
    try:
        answer = _run_apart(request, kept, folder)
    except Exception as error:  # noqa: BLE001
        answer = {"ended": "failed", "text": f"{type(error).__name__}: {error}"}
    data = json.dumps(answer).encode()
    while data:
        data = data[os.write(tells, data) :]


def _run_apart(request, kept, folder):
    streams = [tempfile.TemporaryFile() for _ in range(4)]  # noqa: SIM115  in, out, err, and the word of a test
    if "files" in kept:
        seal_files(folder, request["file_limit_bytes"])
    token = os.urandom(16).hex().encode()
    with open(os.path.join(folder, "solution.py"), "w", encoding="utf-8", errors="replace") as file:
        file.write(request["program"])
    name = "solution.py"
    if request["test"] is not None:
        name = "main.py"
        with open(os.path.join(folder, name), "w", encoding="utf-8", errors="replace") as file:
            file.write(f"TEXT = {request['test']!r}\nTOKEN = {token!r}\n{_TEST}")
    streams[0].write(request["stdin"].encode("utf-8", "replace"))
    streams[0].seek(0)
    if sys.platform == "linux":
        _call("prctl", _SUBREAPER, 1, 0, 0, 0)
        if "processes" in kept:
            _call("unshare", NEW_PIDS)
    if "user" in kept:
        os.chmod(folder, 0o777)  # a user of its own is to write there
    num_tasks, parent = _num_tasks(), os.getpid()
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        _become(request, folder, name, streams, kept, num_tasks, parent, tells)
    os.close(tells)
    is_stopped = os.read(told, 1)  # until it is closed, as the last thing before the program
    ended, status = _wait(child, request)
    if is_stopped:
        return {"ended": "failed", "text": "the system does not keep it from other processes any more"}
    return _told(ended, status, request, streams, token)


def _become(request, folder, name, streams, kept, num_tasks, parent, tells):
    """Be the program; or say a byte and end, where that would not be apart although it is to be."""
    try:
        os.setsid()
        if sys.platform == "linux":
            try:
                _leave_rights(kept, parent)
            except BaseException:
                os.write(tells, b"!")
                raise
        os.chdir(folder)
        for place, stream in enumerate(streams):
            os.dup2(stream.fileno(), place + 10)
        for place in range(len(streams)):
            os.dup2(place + 10, place)
        os.closerange(len(streams), 1024)
        os.set_inheritable(3, True)
        _limit(request, num_tasks)
        for number in range(1, signal.NSIG):
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                with contextlib.suppress(OSError, ValueError):
                    signal.signal(number, signal.SIG_DFL)
        one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", **one}
        env["PYTHONHASHSEED"], env["PYTHONDONTWRITEBYTECODE"] = "0", "1"
        os.execve(request["python"], [request["python"], "-s", "-P", name], env)
    finally:
        os._exit(127)


def _leave_rights(kept, parent):
    """This process, and what it becomes, is apart, may do no more than its user, and ends with the one that watches it."""
    if "processes" in kept:
        hide_processes()
    if os.getuid() == 0:
        for number in range(64):
            with contextlib.suppress(NotAllowedError):  # there are about 40 of them
                _call("prctl", _DROP_CAPABILITY, number, 0, 0, 0)
    if "user" in kept:
        become_other()
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call("prctl", _DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() not in (0, parent):  # 0: it is outside of this namespace
        raise NotAllowedError("the process that watches it is gone")


def _num_tasks():
    """Processes and threads of this user, whom the system gives one limit of them."""
    found = 0
    for name in filter(str.isdigit, os.listdir("/proc")) if sys.platform == "linux" else ():
        try:
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                found += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return found


def _limit(request, num_tasks):
    limits = {
        "RLIMIT_AS": request["memory_limit_bytes"],
        "RLIMIT_FSIZE": request["file_limit_bytes"],
        "RLIMIT_CPU": int(request["timeout_s"] * request["max_processes"]) + 2,
        "RLIMIT_NPROC": num_tasks + request["max_processes"],
        "RLIMIT_CORE": 0,
        "RLIMIT_NOFILE": 256,
    }
    for name, value in limits.items():
        with contextlib.suppress(ValueError, OSError):  # less is allowed already, or the system has no such limit
            resource.setrlimit(getattr(resource, name), (value, value))


def _wait(child, request):
    """Until it ends or is ended; nothing of it is left afterwards."""
    until, looked = time.monotonic() + request["timeout_s"], 0.0
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            break
        now = time.monotonic()
        if now > until:
            return _end(child, "timeout")
        if now > looked + 0.02:
            looked = now
            if len(_descendants()) > request["max_processes"]:
                return _end(child, "processes")
        time.sleep(POLL_S)
    _end(None, "")
    return "", status


def _end(child, why):
    """Kill it and whatever it has started, until nothing is left."""
    status = 0
    while True:
        for pid in ({child} if child else set()) | _descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            found, code = os.waitpid(-1, 0 if child else os.WNOHANG)
        except ChildProcessError:
            return why, status
        if found == child:
            child, status = None, code
        if not found:
            time.sleep(POLL_S)


def _descendants():
    """Processes and threads below this process. Orphans come to this process, or die with the first of their namespace."""
    found, new = set(), [os.getpid()]
    while new:
        pid = new.pop()
        try:
            tasks = os.listdir(f"/proc/{pid}/task")
            for task in tasks:
                with open(f"/proc/{pid}/task/{task}/children") as file:
                    new += [int(child) for child in file.read().split()]
        except OSError:
            continue
        if pid != os.getpid():
            found |= set(map(int, tasks))
    return found


def _told(ended, status, request, streams, token):
    texts = []
    for stream, most in zip(streams[1:], (request["max_output_bytes"] + 1, 1 << 20, 64), strict=True):
        stream.seek(0)
        texts.append(stream.read(most) if stream is not streams[2] else _end_of(stream))
    out, err, word = texts
    code = os.waitstatus_to_exitcode(status)
    err = err.decode("utf-8", "replace")
    is_told = request["test"] is None or word.startswith((b"right" + token, b"wrong" + token))
    if not ended and (code or not is_told):
        is_short = "MemoryError" in err or "annot allocate memory" in err
        ended = "memory" if is_short else "crash"
    elif not ended and request["test"] is not None:
        ended = "" if word.startswith(b"right") else "wrong"
    return {"ended": ended, "code": code, "out": out.decode("utf-8", "replace"), "text": err}


def _end_of(stream):
    stream.seek(max(0, stream.seek(0, os.SEEK_END) - MAX_TEXT_BYTES))
    return stream.read()


def main(python, isolation):
    os.umask(0o022)  # another user is to read what lies here
    for stream in (sys.stdin, sys.stdout):
        os.set_inheritable(stream.fileno(), False)
    kept = probe(python, isolation)
    for line in sys.stdin:
        try:
            answer = run(json.loads(line), kept) if line.strip() else kept
        except OSError as error:
            answer = {"ended": "failed", "text": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
