"""Programs that a model wrote are run with limits, and earn what they pass; none does harm to the run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from written_rollouts import make_rollout

from strop.config.sampling import CodeRewardOptions
from strop.rewards import jail_server, make_scorer
from strop.rewards.code import CodeScore, program_of
from strop.rewards.code_tests import CodeTest, code_label
from strop.rewards.jail import Jail, Limits, describe
from strop.rewards.label import LabelError
from strop.rewards.make import label_check
from strop.types import RewardError

REVERSES = [{"input": "abc\n", "output": "cba\n"}, {"input": "", "output": ""}, {"input": "xy", "output": "yx"}]
LIMITS = {"timeout_s": 20.0, "memory_limit_mb": 256, "max_processes": 8, "file_limit_mb": 2}


@pytest.fixture(scope="module")
def scorer_of():
    made = {}

    def make(**options):
        key = tuple(options.items())
        if key not in made:
            made[key] = make_scorer(CodeRewardOptions(**(LIMITS | options)))
        return made[key]

    yield make
    for scorer in made.values():
        scorer.close()


def score(scorer, text, label):
    scored = scorer([make_rollout(text, label=label)])
    counts = {name.removeprefix("reward/num_"): m.value for name, m in scored.metrics.items() if m.value}
    return scored.rollouts[0].reward, counts


# ---- what a program earns --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program, label, reward, counts",
    [
        ("s = input() if 1 else 0\nprint(s[::-1])", REVERSES[::2], 1.0, {}),
        ("print(input()[::-1])", REVERSES, 0.0, {"crashes": 1}),  # no line to read in the second
        ("import sys\nfor l in sys.stdin: print(l.strip()[::-1], ' ')", json.dumps(REVERSES), 1.0, {}),
        ("print('cba')", REVERSES, 0.0, {"wrong": 1}),
        ("print(1, end='')", {"inputs": ["", "a"], "outputs": ["1\n", ["1"]]}, 1.0, {}),
        ("def f(x): return x + 1", ["assert f(1) == 2", "assert f(2) == 3"], 1.0, {}),
        ("def f(x): return x + 1", "    assert f(1) == 3\n    assert f(1) == 2", 0.0, {"wrong": 1}),
        ("def g(x): return x", "assert f(1) == 1", 0.0, {"crashes": 1}),
        ("if __name__ == '__main__': input()\nf = 1", "assert f == 1", 1.0, {}),
        ("f = ", "assert f == 1", 0.0, {"crashes": 1}),
        ("", "assert f == 1", 0.0, {"wrong": 1}),
        ("f = '\ud800'", "assert True", 1.0, {}),
    ],
)
def test_a_program_earns_1_where_it_passes_all_tests(scorer_of, program, label, reward, counts):
    assert score(scorer_of(), program, label) == (reward, counts)


def test_with_fraction_it_earns_the_share_that_it_passes_and_is_counted_once_by_its_first_failure(scorer_of):
    assert score(scorer_of(score="fraction"), "print(input()[::-1])", REVERSES) == (
        pytest.approx(2 / 3),
        {"crashes": 1},
    )
    scorer = scorer_of(score="fraction", timeout_s=1.0)
    label = ["assert f(0) is None", "assert f(1) == 2", "assert f(0) is None"]
    program = "def f(x):\n    while x: pass"
    # one timeout is counted: no others are run after one that took too long
    assert score(scorer, program, [label[0], *label[1:2] * 50, label[2]]) == (pytest.approx(1 / 52), {"timeouts": 1})


@pytest.mark.parametrize(
    "text, program",
    [
        ("```python\na\n```\nor\n```py\nb\n```\n```\noutput\n```", "b"),
        ("```\na\n```", "a"),
        ("so:\n  ```python3 title=x\n  a\n  ```", "  a"),
        ("```python\nif a:\n    b\n", "if a:\n    b"),
        ("a = 1", "a = 1"),
        ("```bash\nls\n```", "ls"),
        ("", ""),
    ],
)
def test_the_program_of_a_response_is_its_last_block_of_python(text, program):
    assert program_of(text) == program


def test_a_response_without_end_is_searched_in_time():
    """One that looked back from every character would take hours."""
    started = time.process_time()
    for text in ("```\n" * 250_000, " " * 10**6, "```python\n" + "`` `\n" * 200_000):
        program_of(text)
    assert time.process_time() - started < 30


# ---- what a program cannot do ----------------------------------------------------------------------------------------

HARMFUL = {
    "while True: pass": "timeout",
    "import time; time.sleep(60)": "timeout",
    "import signal, os\nfor n in range(1, 32):\n    n in (9, 19) or signal.signal(n, lambda *a: 0)\nwhile 1: pass": "timeout",
    "x = bytearray(1 << 30)": "memory",
    "x = []\nwhile True: x.append(bytearray(1 << 22))": "memory",
    "import os, time\nfor i in range(20):\n    if os.fork() == 0: time.sleep(9)\ntime.sleep(9)": "processes or crash",
    "open('x', 'wb').write(bytes(3 << 20))": "crash",
    "while True: print('x' * 1000)": "crash",
    "import os; os.abort()": "crash",
    "import ctypes; ctypes.string_at(0)": "crash",
    "raise SystemExit(0)": "crash",
    "raise SystemExit(127)": "crash",
    "import os; os._exit(0)": "crash",
    "import os; os.write(3, b'right')": "crash",
    "def f(): f()\nf()": "crash",
}


NO_NAMESPACES = "it.leave_network = lambda: it._call('unshare', -1);"
PYTHON_OF_ALL = shutil.which(
    "python3", path="/usr/bin:/usr/local/bin"
)  # that of this test may lie where root alone reads
MODES = {
    "apart": {},
    "another user": {"code": NO_NAMESPACES, "python": PYTHON_OF_ALL},
    "limits": {"code": NO_NAMESPACES, "isolation": "limits"},
}
LIMITED = Limits(**LIMITS)


class Server:
    """A process that runs programs, prepared by code."""

    def __init__(self, code="", isolation="full", python=sys.executable):
        self.python = python
        code = f"sys.path.insert(0, {jail_server.__file__.rpartition('/')[0]!r}); import jail_server as it; {code}"
        command = [sys.executable, "-I", "-S", "-c", f"import sys; {code} it.main({python!r}, {isolation!r})"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        self.kept = self.ask("")

    def ask(self, line):
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def __call__(self, program, *, test="assert True", wait=True, timeout_s=LIMITED.timeout_s):
        given = {"program": program, "stdin": "", "test": test, "max_output_bytes": 99, "python": self.python}
        given |= {"timeout_s": timeout_s if wait else 60, "max_processes": LIMITED.max_processes}
        given |= {"memory_limit_bytes": LIMITED.memory_limit_mb << 20, "file_limit_bytes": LIMITED.file_limit_mb << 20}
        if wait:
            return self.ask(json.dumps(given))
        self.process.stdin.write(json.dumps(given).encode() + b"\n")
        return self.process.stdin.flush()

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(10)


@pytest.fixture(scope="module", params=MODES)
def run(request):
    """Runs a program where the system keeps it from others, as another user, and with limits alone."""
    if not MODES[request.param].get("python", "python") or sys.platform != "linux":
        pytest.skip("not on this system")
    server = Server(**MODES[request.param])
    wanted = {"apart": ["network", "processes", "files"], "another user": ["user"], "limits": []}[request.param]
    if server.kept != wanted:
        server.close()
        pytest.skip(f"this system keeps programs from {server.kept}")
    if server("x = 1")["ended"]:
        server.close()
        pytest.skip("this system's Python is too old")
    yield server
    assert server.close() == 0


@pytest.mark.parametrize("program", HARMFUL)
def test_a_harmful_program_ends_within_its_limits_and_the_next_one_runs(run, program):
    if not run.kept and HARMFUL[program] == "crash":
        return  # nothing that isolation has a part in
    started = time.monotonic()
    answer = run(program, timeout_s=0.4) if HARMFUL[program] == "timeout" else run(program)
    assert answer["ended"] in HARMFUL[program], answer
    assert time.monotonic() - started < 40  # by itself it would go on for 60 s or for ever


def test_the_next_program_runs(run):
    assert run("x = 1")["ended"] == ""


def test_a_program_can_do_nothing_to_other_processes(run):
    """Signal 0 is sent to nobody: it asks whether one could be."""
    if not run.kept:
        pytest.skip("limits alone")
    for pid in (os.getpid(), os.getppid(), run.process.pid):
        answer = run(
            f"import os\ntry: os.kill({pid}, 0)\nexcept (ProcessLookupError, PermissionError): pass\nelse: 1/0"
        )
        assert answer["ended"] == "", answer
    mount = "import ctypes; assert ctypes.CDLL(None).mount(b'proc', b'/proc', b'proc', 0, None) == -1"
    assert run(mount)["ended"] == ""


@pytest.mark.parametrize(
    "prepared, program", [("it.NEW_PIDS = 0", "x = 1"), ("it.become_other = lambda: 1/0", "x = 1")]
)
def test_a_program_that_would_not_be_apart_does_not_begin(prepared, program):
    """As where what the system allowed at the start is not allowed any more."""
    kept = ["network", "processes", "files"] if "PIDS" in prepared else ["user"]
    probe = f"it.probe = lambda *given: ('network' in {kept} and it.leave_network(), {kept})[1]; {prepared};"
    if Jail().kept != tuple(kept) and os.getuid():
        pytest.skip("not on this system")
    server = Server(probe)
    assert server("open('/tmp/strop-was-here', 'w')") == {
        "ended": "failed",
        "text": "the system does not keep it from other processes any more",
    }
    server.close()


def test_a_program_ends_with_the_run_that_is_killed(run):
    seconds = 60 + os.getpid() / 1e6
    server = Server(**MODES[{0: "limits", 1: "another user", 3: "apart"}[len(run.kept)]])
    command = [sys.executable, "-S", "-c", f"import time; time.sleep({seconds})"]
    server(f"import os; os.execv({server.python!r}, {command})", wait=False)
    assert _within(60, lambda: _has_command(seconds))
    os.killpg(server.process.pid, signal.SIGKILL)  # a session of its own, which this test began
    assert _within(60, lambda: not _has_command(seconds))
    server.close()


def test_where_a_program_could_reach_files_and_processes_the_run_does_not_begin():
    """In a namespace in which there can be no others, and one user alone."""
    forbid = "for a in user net; do echo 0 > /proc/sys/user/max_${a}_namespaces || exit 7; done"
    ask = "from strop.rewards.jail import Jail; print(Jail('limits').kept); Jail()"
    shell = ["unshare", "--user", "--map-root-user", "sh", "-c", f'{forbid}; exec "$@"', "sh"]
    if not shutil.which("unshare"):
        pytest.skip("no unshare")
    done = subprocess.run([*shell, sys.executable, "-c", ask], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 7 or "unshare" in done.stderr:
        pytest.skip("no namespaces")
    assert done.stdout == "()\n"
    assert describe(()) == "limits alone; they have the network and can change your files and end your processes"
    assert "RewardError: reward.isolation must be limits for reward.kind = code here, got full" in done.stderr


def test_nothing_that_a_program_has_started_goes_on_after_it(run, tmp_path):
    """Also what left its group and its session."""
    seconds = 60 + os.getpid() / 1e6
    program = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv({sys.executable!r}, [{sys.executable!r}, "-S", "-c", "import time; time.sleep({seconds})"])
    os._exit(0)
time.sleep(0.1)
"""
    assert run(program)["ended"] == ""
    assert not _has_command(seconds)


def _has_command(seconds):
    done = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return any(f"time.sleep({seconds})" in line for line in done.stdout.splitlines())


def _within(limit_s, is_so):
    until = time.monotonic() + limit_s
    while not is_so() and time.monotonic() < until:
        time.sleep(0.02)
    return is_so()


def test_a_program_begins_in_an_empty_folder_without_the_environment_of_the_run(run, monkeypatch):
    program = "import os; assert os.listdir() == ['solution.py']"
    assert run(program)["ended"] == ""
    program = "import os; print(sorted(set(os.environ) - {'LC_CTYPE'}))"
    found = run(program, test=None)["out"]
    assert "PYTHONPATH" not in found
    assert "HOME" in found


def test_a_program_has_no_network_sees_no_process_and_writes_nowhere_else_where_the_system_allows_it(tmp_path):
    jail = Jail()
    limits = Limits(**LIMITS)
    if "files" not in jail.kept:
        pytest.skip(f"this system: {describe(jail.kept)}")
    for program, word in (
        ("import socket; socket.create_connection(('127.0.0.1', 9), 1)", "crash"),
        ("import socket; assert len(socket.if_nameindex()) <= 1", ""),
        ("import os; assert [n for n in os.listdir('/proc') if n.isdigit()] in ([], ['1'])", ""),
        (f"open({str(tmp_path / 'x')!r}, 'w')", "crash"),
        ("open('/tmp/x', 'w')", "crash"),
        ("for n in range(3): open(str(n), 'wb').write(bytes(1 << 20))", "crash"),  # more than all files may have
        ("open('here', 'w').write('x')", ""),
    ):
        assert jail.run(program, limits, test="pass").ended == word, program
    jail.close()
    assert list(tmp_path.iterdir()) == []


def test_a_run_says_what_programs_may_do(caplog):
    make_scorer(CodeRewardOptions(isolation="limits")).close()
    assert "reward.kind = code runs what the model writes with limits" in caplog.text
    assert "can change your files and end your processes" in caplog.text
    assert describe(("user",)) == "limits, and programs run as a user of their own; they have the network"


def test_limits_in_which_python_does_not_start_are_refused_at_the_start():
    with pytest.raises(RewardError, match=r"reward.kind = code must be able to run a program that does nothing"):
        CodeScore(Limits(1.0, 1, 8, 2), "all", "full")


def test_a_process_that_is_ended_from_outside_costs_no_program_its_score():
    jail, ended = Jail(), []
    for kill in (jail._process.kill_group, jail._process.kill, None):
        thread = threading.Thread(
            target=lambda: ended.append(jail.run("import time; time.sleep(0.4)", Limits(**LIMITS), test="pass").ended)
        )
        thread.start()
        time.sleep(0.2)
        if kill:
            kill()
        thread.join()
    assert ended == ["", "", ""]
    jail.close()


def test_a_scorer_called_from_a_thread_that_ends_scores_the_same_afterwards():
    scorer = make_scorer(CodeRewardOptions(**LIMITS))
    batch = [make_rollout("x = 1", label="assert x == 1") for _ in range(4)]
    found = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(scorer(batch)))
        thread.start()
        thread.join()
    assert [rollout.reward for scored in found for rollout in scored.rollouts] == [1.0] * 8
    scorer.close()


def test_an_interrupted_scorer_begins_no_other_test():
    scorer = CodeScore(Limits(**LIMITS), "all", "full")
    label = ["import time; time.sleep(0.2)"] * 600
    started = time.monotonic()

    def interrupt(num_done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scorer([make_rollout(text, label=label[i:]) for text, i in (("x = 1", 599), ("x = 1", 0))], interrupt)
    assert time.monotonic() - started < 60  # all would take twice as long
    scorer.close()


# ---- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "label, tests",
    [
        ('["assert 1", {"stdin": "a", "stdout": "b"}]', (CodeTest(code="assert 1"), CodeTest(stdin="a", stdout="b"))),
        ([{"output": "b"}], (CodeTest(stdin="", stdout="b"),)),
        ({"inputs": [["1", "2"]], "outputs": ["3"]}, (CodeTest(stdin="1\n2", stdout="3"),)),
        ("[x] = f()", (CodeTest(code="[x] = f()"),)),
        (7, (CodeTest(code="7"),)),
    ],
)
def test_a_label_gives_tests_as_json_or_as_code(label, tests):
    assert code_label(label) == tests


@pytest.mark.parametrize(
    "label, message",
    [
        (None, "the label must be a list of .* got None"),
        ("", "there must be a test in the label"),
        ([], "there must be a test in the label"),
        ({"inputs": ["1"], "outputs": []}, "must be as long as each other .* got 1 and 0"),
        ([{"input": "1"}], r"test 0 of the label must be one .* got \{'input': '1'\}"),
        ([{"input": 1, "output": "1"}], "test 0 of the label must be one"),
        (["assert 1", ""], "test 1 of the label must be one"),
        (True, "the label must be a list of"),
    ],
)
def test_a_label_without_tests_is_refused_when_the_data_is_read(label, message):
    with pytest.raises(LabelError, match=message):
        label_check(CodeRewardOptions())(label)
