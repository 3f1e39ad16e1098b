"""Ctrl-C and SIGTERM end a run between two steps: exit code 130, and the model as it was after the last whole step."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from commands.small_runs import ENVIRONMENT, Done, command_line, metrics, read_lines, same_weights, small_once, strop
from forked import Command
from processes import is_running

import strop as package
from strop.observe.console import QuietConsole

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard():
    """Also where the tests run in the background of a shell script, which makes its children ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(number, *arguments, folder, after="step "):
    """Starts a command, sends it a signal once it has printed a line that begins with `after`, and waits for its end."""
    with Command(folder, *arguments) as command:
        command.until(after)
        command.send_signal(number)
        return Done(command.wait(), command.out, command.err)


def steps_of(done):
    """How many steps the command says it has made."""
    return int(re.search(r"interrupted after step (\d+); saving", done.out)[1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl_c", "sigterm"])
def test_an_interrupted_run_exits_with_130_and_saves_the_model_after_its_last_whole_step(small, tmp_path, number):
    flags = ("--reward.function", small.reward("slow"), "--num-steps", "1000", "--run.folder", tmp_path / "run")
    done = interrupted(number, "train", small.train, *flags, folder=tmp_path, after="step    2/1000")
    assert done.code == 130, done
    assert "Traceback" not in done.err
    steps = steps_of(done)
    assert 2 <= steps < 1000
    assert len([line for line in done.out.splitlines() if line.startswith("step ")]) == steps
    assert [row["step"] for row in read_lines(tmp_path / "run/metrics.jsonl")] == list(range(1, steps + 1))
    assert (tmp_path / "run/report.html").exists()
    # the same scores without the waiting, so many steps and no more
    again = ("--num-steps", steps, "--run.folder", tmp_path / "again")
    assert strop("train", small.train, *again).code == 0
    assert same_weights(tmp_path / "run/model", tmp_path / "again/model")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "again")


def test_an_interrupted_sft_exits_with_130_and_saves_the_model_after_its_last_step(small, tmp_path):
    flags = ("--num-steps", "100000", "--run.folder", tmp_path / "run")
    done = interrupted(signal.SIGINT, "sft", small.sft, *flags, folder=tmp_path, after="step ")
    assert done.code == 130, done
    assert "Traceback" not in done.err
    steps = steps_of(done)
    assert [row["step"] for row in read_lines(tmp_path / "run/metrics.jsonl")] == list(range(1, steps + 1))
    assert strop("sft", small.sft, "--num-steps", steps, "--run.folder", tmp_path / "again").code == 0
    assert same_weights(tmp_path / "run/model", tmp_path / "again/model")


# ---- before the first step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0.02, 0.2, 0.4, 0.8, 1.6, 2.4])
def test_whenever_it_is_interrupted_while_it_starts_the_code_is_130_and_there_is_no_half_made_run(
    small, tmp_path, delay
):
    arguments = ["strop", "train", str(small.train), "--num-steps", "1000", "--run.folder", str(tmp_path / "run")]
    program = (
        "import signal, sys, strop.cli\n"
        "def heard(number, handler, set_handler=signal.signal):\n"
        "    before = set_handler(number, handler)\n"
        "    if number == signal.SIGTERM and not said:\n"
        "        said.append(print('ready', flush=True))  # the command hears of both from here on\n"
        "    return before\n"
        f"said, signal.signal, sys.argv = [], heard, {arguments}\n"
        "strop.cli.main()"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=ENVIRONMENT, text=True, **pipes)
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists() or (tmp_path / "run/model/model.safetensors").exists()


@pytest.mark.parametrize("then", ["pass", "raise ImportError('half imported')"])
def test_an_interrupt_that_an_import_swallows_is_remembered(small, tmp_path, then):
    (tmp_path / "mine.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        f"except KeyboardInterrupt:\n    {then}\n"
        "def score(rollout):\n    return 1.0\n"
    )
    done = strop(
        *("train", small.train, "--reward.function", f"{tmp_path}/mine.py:score", "--reward.num_workers", "0"),
        *("--run.folder", tmp_path / "run"),
    )
    assert done.code == 130, done
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("delay", [0.03, 0.1])
def test_a_second_signal_after_all_is_saved_does_not_change_how_it_ends(small, tmp_path, delay):
    """The interpreter is going down: its exit code stays 130, and the run stays whole."""
    arguments = ["train", small.train, "--num-steps", "1000", "--run.folder", tmp_path / "run"]
    with subprocess.Popen(command_line(*arguments), env=ENVIRONMENT, text=True, stdout=subprocess.PIPE) as process:
        try:
            next(line for line in process.stdout if line.startswith("step "))
            process.send_signal(signal.SIGINT)
            next(line for line in process.stdout if line.startswith("model: "))  # the last line: everything is written
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 130
    assert (tmp_path / "run/model/model.safetensors").exists()


# ---- while a slow scorer works --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl_c", "sigterm"])
def test_a_scorer_that_takes_long_does_not_keep_a_run_from_stopping(small, tmp_path, number):
    (tmp_path / "judge.py").write_text(
        "import os, time\n"
        "def score(rollout):\n    print('judging', os.getpid(), flush=True)\n    time.sleep(300)\n    return 1.0\n"
    )
    flags = ("--reward.function", f"{tmp_path}/judge.py:score", "--run.folder", tmp_path / "run")
    done = interrupted(number, "train", small.train, *flags, folder=tmp_path, after="judging")
    assert done.code == 130, done
    workers = [int(pid) for pid in re.findall(r"judging (\d+)", done.out)]
    until = time.monotonic() + 60
    while any(map(is_running, workers)) and time.monotonic() < until:
        time.sleep(0.02)
    assert workers
    assert not any(map(is_running, workers))
    assert steps_of(done) == 0
    assert same_weights(tmp_path / "run/model", small.start)


def test_a_scorer_that_takes_long_does_not_keep_an_evaluation_from_stopping(small, tmp_path):
    (tmp_path / "judge.py").write_text(
        "import time\ndef score(rollout):\n    print('judging', flush=True)\n    time.sleep(300)\n    return 1.0\n"
    )
    flags = (*small.eval_flags, "--reward.function", f"{tmp_path}/judge.py:score")
    done = interrupted(signal.SIGINT, "eval", small.train, *flags, folder=tmp_path, after="judging")
    assert done.code == 130, done
    assert "Traceback" not in done.err


# ---- at moments of our choice, in this process ----------------------------------------------------------------------


class Interrupting(QuietConsole):
    """Sends this process SIGINT when the given phase begins for the n-th time."""

    def __init__(self, phase, time):
        super().__init__()
        self.warnings, self._phase, self._left = [], phase, time

    def warn(self, text):
        self.warnings.append(text)

    def phase(self, name, total, **more):
        self._left -= name == self._phase
        if name == self._phase and self._left == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return super().phase(name, total, **more)


@pytest.mark.parametrize("phase", ["sample", "score", "train", "eval"])
@pytest.mark.parametrize("every_steps", [1, 0])
def test_wherever_in_a_step_it_is_interrupted_model_metrics_and_result_are_of_the_same_step(
    small, tmp_path, phase, every_steps
):
    """With evaluations after every step, and with none but before the first step and after the last."""
    options = {"eval.data.kind": "jsonl", "eval.data.path": f"{small.folder}/held_out.jsonl"}
    options |= {"eval.data.max_prompts": 4, "eval.every_steps": every_steps, "run.num_steps": 6}
    console = Interrupting(phase, 2 if every_steps == 0 and phase == "eval" else 3)
    config = package.load_config(small.train, {**options, "run.folder": str(tmp_path / "run")})
    result = package.train(config, console=console)
    assert result.interrupted
    (warning,) = console.warnings
    steps = int(re.search(r"after step (\d+)", warning)[1])
    assert 0 < steps <= 6
    assert [row["step"] for row in result.steps] == list(range(steps + 1))  # 0: the evaluation before the first
    assert [row["step"] for row in read_lines(tmp_path / "run/metrics.jsonl")] == list(range(steps + 1))
    assert strop("train", small.train, "--num-steps", steps, "--run.folder", tmp_path / "again").code == 0
    assert same_weights(tmp_path / "run/model", tmp_path / "again/model")


def test_an_interrupt_during_the_first_evaluation_saves_the_model_as_it_started(small, tmp_path):
    held_out = {"eval.data.kind": "jsonl", "eval.data.path": f"{small.folder}/held_out.jsonl"}
    config = package.load_config(small.train, {**held_out, "run.folder": str(tmp_path / "run")})
    result = package.train(config, console=Interrupting("eval", 1))
    assert result.interrupted
    assert result.steps == []
    assert same_weights(tmp_path / "run/model", small.start)


def test_an_interrupted_run_resumes_as_if_it_had_not_been(small, tmp_path):
    options = {"run.num_steps": 4, "run.checkpoint_every_steps": 3, "trainer.lr_schedule": "cosine"}
    config = package.load_config(small.train, {**options, "run.folder": str(tmp_path / "run")})
    assert package.train(config, console=Interrupting("sample", 3)).interrupted
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_000002"]
    assert package.train(config, resume=True).interrupted is False
    whole = package.load_config(small.train, {**options, "run.folder": str(tmp_path / "whole")})
    package.train(whole)
    assert same_weights(tmp_path / "run/model", tmp_path / "whole/model")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


class Impatient(QuietConsole):
    """Sends this process SIGINT twice, as an impatient user does, after the first update of the third step."""

    def __init__(self):
        super().__init__()
        self._phases = []

    def phase(self, name, total, **more):
        self._phases.append(name)
        return super().phase(name, total, **more)

    def advance(self, done):
        if self._phases[-1] == "train" and self._phases.count("train") == 3 and done == 1:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)


def test_a_run_stopped_at_once_within_a_step_resumes_from_before_that_step(small, tmp_path):
    """The step is made of two updates; weights after one of them are no state that a run without a stop ever has."""
    options = {"run.num_steps": 4, "run.checkpoint_every_steps": 1}
    config = package.load_config(small.train, {**options, "run.folder": str(tmp_path / "run")})
    with pytest.raises(KeyboardInterrupt):
        package.train(config, console=Impatient())
    assert [row["step"] for row in read_lines(tmp_path / "run/metrics.jsonl")] == [1, 2]
    package.train(config, resume=True)
    package.train(package.load_config(small.train, {**options, "run.folder": str(tmp_path / "whole")}))
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert same_weights(tmp_path / "run/model", tmp_path / "whole/model")
