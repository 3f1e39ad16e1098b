"""Programs that a model wrote are run with limits, and earn what they pass; none does harm to the run."""

import json
import os
import subprocess
import sys
import time

import pytest
from written_rollouts import make_rollout

from strop.config.sampling import CodeRewardOptions
from strop.rewards import jail_server, make_scorer
from strop.rewards.code import program_of
from strop.rewards.code_tests import CodeTest, code_label
from strop.rewards.jail import Jail, Limits, describe
from strop.rewards.label import LabelError
from strop.rewards.make import label_check

REVERSES = [{"input": "abc\n", "output": "cba\n"}, {"input": "", "output": ""}, {"input": "xy", "output": "yx"}]
LIMITS = {"timeout_s": 1.0, "memory_limit_mb": 256, "max_processes": 8, "file_limit_mb": 2}


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
    scorer = scorer_of(score="fraction", timeout_s=0.3)
    assert score(scorer, "print(input()[::-1])", REVERSES) == (pytest.approx(2 / 3), {"crashes": 1})
    label = ["assert f(0) is None", "assert f(1) == 2", "assert f(0) is None"]
    program = "def f(x):\n    while x: pass"
    started = time.monotonic()
    assert score(scorer, program, [label[0], *label[1:2] * 50, label[2]]) == (pytest.approx(1 / 52), {"timeouts": 1})
    assert time.monotonic() - started < 5  # no others are run after one that took too long


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
    started = time.monotonic()
    for text in ("```\n" * 250_000, " " * 10**6, "```python\n" + "`` `\n" * 200_000):
        program_of(text)
    assert time.monotonic() - started < 2


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
    "import os; os._exit(0)": "crash",
    "import os; os.write(3, b'right')": "crash",
    "def f(): f()\nf()": "crash",
}


@pytest.fixture(scope="module", params=["apart", "by limits alone"])
def run(request):
    """Runs a program where the system keeps it from others, and where it cannot."""
    code = f"import sys; sys.path.insert(0, {jail_server.__file__.rpartition('/')[0]!r}); import jail_server as it;"
    code += "it.probe = lambda python: [];" if request.param != "apart" else ""
    command = [sys.executable, "-I", "-S", "-c", f"{code} it.main(sys.executable)"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    limits = Limits(**(LIMITS | {"timeout_s": 0.5}))

    def ask(program, *, test="assert True"):
        given = {"program": program, "stdin": "", "test": test, "max_output_bytes": 99, "python": sys.executable}
        given |= {"timeout_s": limits.timeout_s, "max_processes": limits.max_processes}
        given |= {"memory_limit_bytes": limits.memory_limit_mb << 20, "file_limit_bytes": limits.file_limit_mb << 20}
        process.stdin.write(json.dumps(given).encode() + b"\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield ask
    process.stdin.close()
    process.stdout.close()
    assert process.wait(10) == 0


@pytest.mark.parametrize("program", HARMFUL)
def test_a_harmful_program_ends_within_its_limits_and_the_next_one_runs(run, program):
    started = time.monotonic()
    answer = run(program)
    assert answer["ended"] in HARMFUL[program], answer
    assert time.monotonic() - started < 5
    assert run("x = 1")["ended"] == ""


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
    assert not [line for line in _command_lines() if f"time.sleep({seconds})" in line]


def _command_lines():
    done = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_program_begins_in_an_empty_folder_without_the_environment_of_the_run(run, monkeypatch):
    program = "import os; assert os.listdir() == ['solution.py']"
    assert run(program)["ended"] == ""
    program = "import os; print(sorted(set(os.environ) - {'LC_CTYPE'}))"
    found = run(program, test=None)["out"]
    assert "PYTHONPATH" not in found
    assert "HOME" in found


def test_a_program_has_no_network_sees_no_process_and_writes_nowhere_else_where_the_system_allows_it(
    scorer_of, tmp_path
):
    jail = Jail()
    kept, limits = jail.kept, Limits(**LIMITS)
    if not {"network", "processes", "files"} <= set(kept):
        pytest.skip(f"this system: {describe(kept)}")
    for program, word in (
        ("import socket; socket.create_connection(('127.0.0.1', 9), 1)", "crash"),
        ("import socket; assert len(socket.if_nameindex()) <= 1", ""),
        (f"import os; os.kill({os.getpid()}, 0)", "crash"),
        (f"open({str(tmp_path / 'x')!r}, 'w')", "crash"),
        ("open('/tmp/x', 'w')", "crash"),
        ("for n in range(3): open(str(n), 'wb').write(bytes(1 << 20))", "crash"),  # more than all files may have
        ("open('here', 'w').write('x')", ""),
    ):
        assert jail.run(program, limits, test="pass").ended == word, program
    jail.close()
    assert list(tmp_path.iterdir()) == []


def test_where_the_system_keeps_programs_from_nothing_the_run_says_so(monkeypatch, caplog):
    monkeypatch.setattr(Jail, "kept", (), raising=False)
    monkeypatch.setattr(Jail, "_start", lambda self: setattr(self, "_end", lambda: None))
    make_scorer(CodeRewardOptions()).close()
    assert "runs what the model writes with limits alone: this system keeps programs from no network" in caplog.text
    assert describe(("user",)) == "limits, and programs run as a user of their own; they have the network"


def test_the_process_that_runs_programs_is_replaced_when_it_is_gone():
    jail = Jail()
    jail._process.kill_group()
    assert jail.run("x = 1", Limits(**LIMITS), test="pass").ended == "crash"
    assert jail.run("x = 1", Limits(**LIMITS), test="pass").ended == ""
    jail.close()


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
