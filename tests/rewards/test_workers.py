"""Workers: whatever a scoring function does to its process, it costs its own rollouts their score and nothing else."""

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial

import pytest
from processes import is_running
from written_rollouts import make_rollout

from strop.config.sampling import FunctionRewardOptions, SlimeRewardOptions
from strop.rewards import make_scorer
from strop.types import RewardError

BAD = """
import os, signal

def does(what):
    if what == "loops":
        while True:
            pass
    if what == "exits":
        os._exit(3)
    if what == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "leaves":
        raise SystemExit(3)
    if what == "allocates":
        taken = []
        while True:
            taken.append(bytearray(1 << 24))
    return 1.0

def score(rollout):
    return does(rollout.text)

async def score_async(rollout):
    return does(rollout.text)

async def score_slime(args, sample):
    return does(sample.response)

def score_all(rollouts):
    return [does(rollout.text) for rollout in rollouts]
"""
WHAT = ("loops", "exits", "is killed", "leaves", "allocates")
WORDS = ("scorer_timeout", "scorer_crash", "scorer_crash", "scorer_error", "scorer_out_of_memory")


@pytest.fixture
def scorer_of(tmp_path):
    """Makes scorers of a file that is written as a user would; they are closed afterwards."""
    made = []

    def make(source, name="score", *, kind=FunctionRewardOptions, **options):
        path = tmp_path / "users.py"
        path.write_text(textwrap.dedent(source))
        made.append(make_scorer(kind(function=f"{path}:{name}", **options)))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


def rollouts_of(*texts):
    return [make_rollout(text, row=i // 2, sample=i % 2) for i, text in enumerate(texts)]


def rewards(scored):
    return [rollout.reward for rollout in scored.rollouts]


def soon(claim, *, limit_s=60.0):
    until = time.monotonic() + limit_s
    while not claim() and time.monotonic() < until:
        time.sleep(0.02)
    return claim()


# ---- a function that does harm ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, kind",
    [("score", FunctionRewardOptions), ("score_async", FunctionRewardOptions), ("score_slime", SlimeRewardOptions)],
)
def test_after_five_that_do_harm_the_good_one_scores_and_each_is_counted_by_its_reason(
    scorer_of, name, kind, monkeypatch
):
    monkeypatch.setattr("strop.rewards.pool.GRACE_S", 0.5)  # for a loop that is stuck, and says nothing
    limits = {"timeout_s": 0.3, "memory_limit_mb": 128}
    scorer = scorer_of(BAD, name, kind=kind, on_error="exclude", **limits)
    scored = scorer(rollouts_of(*WHAT, "scores"))
    assert rewards(scored) == [None] * 5 + [1.0]
    assert tuple(rollout.excluded for rollout in scored.rollouts[:5]) == WORDS
    assert {name: metric.value for name, metric in scored.metrics.items()} == {
        "reward/num_errors": 5,
        "reward/num_excluded": 5,
        "reward/num_timeouts": 1,
        "reward/num_crashes": 2,
        "reward/num_out_of_memory": 1,
    }
    assert rewards(scorer(rollouts_of("scores"))) == [1.0]


@pytest.mark.parametrize(
    "what, message",
    [
        (
            "loops",
            r"did not end within reward.timeout_s = 0.2 s and was stopped .* Mend it, raise reward.timeout_s, or",
        ),
        ("exits", r"ended its process with exit code 3 for .* Mend it, look at what it printed, or"),
        ("is killed", r"lost its process to signal 9 \(SIGKILL, by itself or by a system that is short of memory\)"),
        ("allocates", r"needed more than reward.memory_limit_mb = 128 .* raise reward.memory_limit_mb, or"),
    ],
)
def test_where_errors_stop_the_run_the_message_names_the_rollout_and_the_limit(scorer_of, what, message):
    scorer = scorer_of(BAD, timeout_s=0.2 if what == "loops" else 20, memory_limit_mb=128)
    with pytest.raises(RewardError, match=rf"users.py:score must return .* but it {message}") as caught:
        scorer(rollouts_of("scores", "scores", "scores", what))
    assert "prompt row 1, sample 1" in str(caught.value)


def test_where_errors_stop_the_run_it_does_not_wait_for_calls_that_are_on_their_way(scorer_of):
    source = """
    import time
    def score(rollout):
        time.sleep(0.3 if rollout.text == "fails" else 60)
        raise ValueError
    """
    started = time.monotonic()
    with pytest.raises(RewardError, match="raised ValueError"):
        scorer_of(source, num_workers=2)(rollouts_of("slow", "fails"))
    assert time.monotonic() - started < 50


@pytest.mark.parametrize("what", ["loops", "exits", "allocates"])
def test_a_batched_function_that_does_harm_costs_the_whole_batch_and_the_next_one_scores(scorer_of, what):
    limits = {"timeout_s": 0.3, "memory_limit_mb": 128}
    scorer = scorer_of(BAD, "score_all", batched=True, on_error="zero", **limits)
    assert rewards(scorer(rollouts_of("scores", what, "scores"))) == [0.0, 0.0, 0.0]
    assert rewards(scorer(rollouts_of("scores", "scores"))) == [1.0, 1.0]


def test_an_async_call_that_takes_too_long_ends_alone_and_its_worker_stays(scorer_of):
    source = """
    import asyncio, os
    async def score(rollout):
        await asyncio.sleep(60 if rollout.text == "slow" else 0)
        return os.getpid()
    """
    scorer = scorer_of(source, timeout_s=0.3, on_error="exclude")
    scored = scorer(rollouts_of("a", "slow", "b"))
    assert scored.rollouts[1].excluded == "scorer_timeout"
    pid = scored.rollouts[0].reward
    assert rewards(scored) == [pid, None, pid]
    assert rewards(scorer(rollouts_of("c"))) == [pid]


def test_async_calls_in_flight_when_another_one_ends_the_worker_are_made_again_and_score(scorer_of):
    source = """
    import asyncio, os
    async def score(rollout):
        await asyncio.sleep(0.1)
        if rollout.text == "exits":
            os._exit(3)
        await asyncio.sleep(0.1)
        return 1.0
    """
    scored = scorer_of(source, on_error="exclude", max_concurrent=4)(rollouts_of("a", "exits", "b", "c", "d"))
    assert rewards(scored) == [1.0, None, 1.0, 1.0, 1.0]
    assert scored.metrics["reward/num_crashes"].value == 1


def test_a_time_limit_of_the_function_s_own_is_an_error_like_any_other(scorer_of):
    source = "async def score(rollout):\n    raise TimeoutError('the judge is slow')"
    scored = scorer_of(source, on_error="exclude")(rollouts_of("a"))
    assert scored.rollouts[0].excluded == "scorer_error"


def test_what_a_stopped_function_has_started_is_ended_with_it(scorer_of, tmp_path):
    source = f"""
    import subprocess
    def begin():
        child = subprocess.Popen(["sleep", "1000"])
        open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
        return child
    children = [begin()]  # while it is loaded, which has no such limit
    def score(rollout):
        children[0].wait()
    """
    scorer_of(source, timeout_s=0.2, on_error="zero")(rollouts_of("a"))
    pid = int((tmp_path / "child").read_text())
    assert soon(lambda: not is_running(pid))


def test_a_worker_that_ends_while_its_child_holds_its_pipes_is_missed_at_once(scorer_of):
    source = """
    import os, time
    def score(rollout):
        if os.fork() == 0:
            time.sleep(60)
        os._exit(4)
    """
    started = time.monotonic()
    scored = scorer_of(source, on_error="exclude")(rollouts_of("a"))
    assert scored.rollouts[0].excluded == "scorer_crash"
    assert time.monotonic() - started < 50


def test_a_worker_that_was_killed_between_two_steps_is_replaced_without_an_error(scorer_of):
    scorer = scorer_of("import os\ndef score(rollout): return os.getpid()")
    (pid,) = rewards(scorer(rollouts_of("a")))
    os.kill(int(pid), signal.SIGKILL)
    assert soon(lambda: not is_running(int(pid)))
    (other,) = rewards(scorer(rollouts_of("a")))
    assert other != pid


@pytest.mark.parametrize(
    "source, message",
    [
        ("import os; os._exit(5)", r"reward.function must be loaded without ending its process, but .* exit code 5"),
        ("raise SystemExit('no key')", r"reward.function = .* failed, it ended the process: SystemExit\('no key'\)"),
        (
            "import no_such_module",
            r"reward.function = .* failed, ModuleNotFoundError: No module named 'no_such_module'",
        ),
    ],
)
def test_a_function_that_ends_its_process_while_it_is_loaded_is_an_error_before_anything_runs(
    scorer_of, source, message
):
    with pytest.raises(RewardError, match=message):
        scorer_of(source)


def test_a_call_that_takes_long_is_told_of_once(scorer_of, tmp_path, monkeypatch, caplog):
    """The call ends a while after that."""
    monkeypatch.setattr("strop.rewards.pool.TELL_AFTER_S", 0.05)
    source = f"""
    import os, time
    def score(rollout):
        while not os.path.exists({str(tmp_path / "told")!r}):
            time.sleep(0.01)
        time.sleep(0.3)
        return 1.0
    """
    scorer = scorer_of(source, timeout_s=100, num_workers=1)
    monkeypatch.setattr(caplog.handler, "emit", partial(_emit_and_touch, caplog.handler.emit, tmp_path / "told"))
    with caplog.at_level(logging.WARNING, logger="strop"):
        scorer([make_rollout("a", row=7, sample=3)])
    (told,) = caplog.messages
    assert "scoring waits for 1 calls of " in told
    assert "prompt row 7, sample 3. reward.timeout_s = 100 ends it." in told


def _emit_and_touch(emit, path, record):
    emit(record)
    path.touch()


# ---- many workers are as one -----------------------------------------------------------------------------------------

VARIOUS = """
import random, time
from fractions import Fraction
from strop.types import TokenRewards

VALUES = [1, 0.5, None, True, Fraction(1, 4), {"a": 1, "b": 2}, TokenRewards([0.5, 1.0]), float("nan"), "error", {"a": 1}]

def score(rollout):
    number = int(rollout.text)
    time.sleep(0.02 * (10 - number) * (number < 4))
    value = VALUES[number]
    if value == "error":
        raise KeyError("no such tool")
    return value
"""


def test_scores_are_the_same_and_in_order_for_any_number_of_workers(scorer_of):
    rollouts = rollouts_of(*"0123456789")
    found = [scorer_of(VARIOUS, num_workers=n, on_error="exclude")(rollouts) for n in (0, 1, 3)]
    assert rewards(found[0]) == [1.0, 0.5, None, 1.0, 0.25, 3.0, 1.5, None, None, 1.0]
    assert found[0].rollouts == found[1].rollouts == found[2].rollouts
    assert found[0].metrics.items() <= found[1].metrics.items() == found[2].metrics.items()


def test_numbers_and_arrays_of_other_libraries_come_back_from_a_worker(scorer_of):
    source = """
    import numpy as np
    from decimal import Decimal
    class Half(float):
        pass
    def score(rollout):
        return {"a": np.float32(0.5), "b": Half(0.25), "c": Decimal("0.125"), "d": np.bool_(True)}
    """
    (found,) = scorer_of(source)(rollouts_of("a")).rollouts
    assert (found.reward, found.reward_parts) == (1.875, {"a": 0.5, "b": 0.25, "c": 0.125, "d": 1.0})


def test_what_is_no_number_is_named_as_it_was_in_the_worker(scorer_of):
    source = "class Odd:\n    pass\ndef score(rollout): return Odd()"
    with pytest.raises(
        RewardError, match=r"must return a number, or None for no score, got <.*Odd object.* of type Odd"
    ):
        scorer_of(source)(rollouts_of("a"))


def test_random_numbers_of_a_function_follow_from_the_rollout_and_not_from_the_worker(scorer_of):
    source = """
    import random, time
    import numpy as np
    def score(rollout):
        time.sleep(0.03)
        return {"python": random.random(), "numpy": np.random.random(), "hash": hash(rollout.text) % 1000}
    """
    rollouts = rollouts_of(*"abcdef")
    one, three = (scorer_of(source, num_workers=n) for n in (1, 3))
    first = [rollout.reward_parts for rollout in one(rollouts).rollouts]
    assert [rollout.reward_parts for rollout in three(rollouts).rollouts] == first
    assert [rollout.reward_parts for rollout in one(rollouts[3:]).rollouts] == first[3:]
    assert len({parts["python"] for parts in first}) == 6


def test_a_slow_function_has_as_many_workers_as_were_asked_for_and_a_fast_one_has_one(scorer_of, tmp_path, monkeypatch):
    source = f"""
    import os, time
    from pathlib import Path
    def score(rollout):  # a slow call ends when three workers make such calls
        Path({str(tmp_path)!r}, f"{{os.getpid()}}.{{rollout.text}}").touch()
        while rollout.text == "slow" and len(list(Path({str(tmp_path)!r}).glob("*.slow"))) < 3:
            time.sleep(0.01)
        return os.getpid()
    """
    scorer = scorer_of(source, num_workers=3, timeout_s=100)
    monkeypatch.setattr("strop.rewards.pool.GROW_AFTER_S", 20)  # on whatever machine this is fast
    assert len(set(rewards(scorer(rollouts_of(*["fast"] * 3))))) == 1
    monkeypatch.undo()
    assert len(set(rewards(scorer(rollouts_of(*["slow"] * 3))))) == 3


def test_progress_counts_rollouts_whoever_scores_them(scorer_of):
    told = []
    scorer_of("def score(rollout): return 1", num_workers=2)(rollouts_of(*"abcd"), told.append)
    assert told == [1, 2, 3, 4]


# ---- what a worker is ------------------------------------------------------------------------------------------------


def test_a_worker_imports_neither_torch_nor_pydantic_so_that_it_starts_fast(scorer_of):
    source = (
        "import sys\ndef score(rollout): return sum(name in sys.modules for name in ('torch', 'pydantic', 'numpy'))"
    )
    assert rewards(scorer_of(source)(rollouts_of("a"))) == [0.0]
    slime = (
        "import sys\nasync def score(args, sample): return sum(name in sys.modules for name in ('torch', 'pydantic'))"
    )
    assert rewards(scorer_of(slime, kind=SlimeRewardOptions)(rollouts_of("a"))) == [0.0]


def test_what_a_function_prints_reaches_the_console(scorer_of, capsys):
    source = """
    import os, sys
    print("loading")
    def score(rollout):
        print("scoring", rollout.text)
        os.write(1, b"raw bytes\\n")
        print("to stderr", file=sys.stderr)
        return 1.0
    """
    scorer = scorer_of(source)
    scorer(rollouts_of("a"))
    scorer.close()
    out, err = capsys.readouterr()
    assert out.splitlines() == ["loading", "scoring a", "raw bytes"]
    assert err.splitlines() == ["to stderr"]


def test_what_imports_count_is_no_part_of_the_memory_limit(scorer_of):
    source = "taken = bytearray(300 << 20)\ndef score(rollout): return len(bytearray(int(rollout.text) << 20)) >> 20"
    scorer = scorer_of(source, memory_limit_mb=200, on_error="exclude")
    assert rewards(scorer(rollouts_of("100", "300", "100"))) == [100.0, None, 100.0]


def test_a_function_that_no_other_process_can_load_is_called_in_this_one_with_a_word_about_it(monkeypatch, caplog):
    monkeypatch.setattr(sys.modules["__main__"], "strop_score", lambda rollout: os.getpid(), raising=False)
    scorer = make_scorer(FunctionRewardOptions(function="__main__:strop_score"))
    assert rewards(scorer(rollouts_of("a"))) == [os.getpid()]
    assert "__main__:strop_score can be loaded by no other process" in caplog.text


def test_without_workers_a_function_is_called_in_this_process(scorer_of):
    scorer = scorer_of("import os\ndef score(rollout): return os.getpid()", num_workers=0)
    assert rewards(scorer(rollouts_of("a"))) == [os.getpid()]


def test_several_workers_for_an_async_function_are_refused(scorer_of):
    with pytest.raises(RewardError, match=r"reward.num_workers must be 0 or 1 for an async function, got 2"):
        scorer_of("async def score(rollout): return 1", num_workers=2)


# ---- none is left behind ---------------------------------------------------------------------------------------------


def test_a_closed_scorer_and_one_that_nobody_holds_leave_no_process(scorer_of, tmp_path):
    source = "import os\ndef score(rollout): return os.getpid()"
    closed = scorer_of(source)
    (one,) = rewards(closed(rollouts_of("a")))
    closed.close()
    forgotten = make_scorer(FunctionRewardOptions(function=f"{tmp_path}/users.py:score"))
    (other,) = rewards(forgotten(rollouts_of("a")))
    del forgotten
    assert not is_running(int(one))
    assert not is_running(int(other))
    assert rewards(closed(rollouts_of("a"))) != [one]  # a closed one starts anew when it is needed


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_when_the_run_is_killed_its_workers_end_whatever_they_do(tmp_path, number):
    (tmp_path / "users.py").write_text(
        "import os, re\n"
        "def score(rollout):\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "    re.fullmatch('(a+)+b', 'a' * 40)\n"  # for ever, without letting other threads of Python run
    )
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from written_rollouts import make_rollout\n"
        "from strop.config.sampling import FunctionRewardOptions; from strop.rewards import make_scorer\n"
        "make_scorer(FunctionRewardOptions(function=sys.argv[2]))([make_rollout('a')])"
    )
    folder = os.path.dirname(__file__)
    run = subprocess.Popen([sys.executable, "-c", program, folder, f"{tmp_path}/users.py:score"])
    try:
        assert soon(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), limit_s=30)
    finally:
        run.send_signal(number)
        run.wait(20)
    assert soon(lambda: not is_running(int((tmp_path / "pid").read_text())))
