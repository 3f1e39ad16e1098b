"""Your own scoring function: where it is looked for, and what is said when it is not there."""

import subprocess
import sys

import pytest
from written_rollouts import make_rollout

from strop.config.sampling import FunctionRewardOptions
from strop.rewards import make_scorer
from strop.types import RewardError


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def score():
    def run(function, text="abc"):
        return make_scorer(FunctionRewardOptions(function=function))([make_rollout(text)]).rollouts[0].reward

    return run


def test_a_function_is_found_in_a_file_and_its_neighbours_can_be_imported(score, tmp_path):
    folder = tmp_path / "my rewards"
    folder.mkdir()
    (folder / "neighbour_of_lengths.py").write_text("FACTOR = 2")
    (folder / "lengths.py").write_text(
        "from dataclasses import dataclass\nfrom neighbour_of_lengths import FACTOR\n"
        "@dataclass\nclass Length:\n    value: 'int'\n"
        "def score(rollout): return Length(len(rollout.text)).value * FACTOR"
    )
    assert score("my rewards/lengths.py:score") == 6.0
    assert score(f"{folder}/lengths.py:score") == 6.0


def test_two_files_of_one_name_are_two_functions(score, tmp_path):
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "twin.py").write_text(f"def score(rollout): return {number}")
    assert [score("1/twin.py:score"), score("2/twin.py:score")] == [1.0, 2.0]


def test_a_function_is_found_in_a_module_of_the_working_directory(tmp_path):
    (tmp_path / "my_scores").mkdir()
    (tmp_path / "my_scores" / "lengths.py").write_text("def score(rollout): return 0.5")
    program = "from strop.rewards.function import load_function as f; print(f('my_scores.lengths:score')(None))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == "0.5\n"


@pytest.mark.parametrize(
    "function, reason",
    [
        ("score", r"must be module:function or path/to/file\.py:function, got 'score'"),
        (":score", "must be module:function"),
        ("rewards.py:", "must be module:function"),
        ("nowhere/rewards.py:score", r"must name a file that exists, .*there is no file nowhere/rewards\.py"),
        ("no_such_module:score", "must name a module that exists, .*there is no module 'no_such_module' in /"),
        ("json.no_such_part:score", "must name a module that exists, .*there is no module 'json.no_such_part'"),
        ("math:no_such_function", "must name a function that exists, .*math has no 'no_such_function'"),
        ("math:pi", "must name a function, got 'math:pi': 'pi' there is of type float"),
    ],
)
def test_a_function_that_is_not_there_is_an_error_before_anything_runs(function, reason):
    with pytest.raises(RewardError, match=rf"^reward\.function {reason}"):
        make_scorer(FunctionRewardOptions(function=function))


@pytest.mark.parametrize(
    "source, reason",
    [
        ("def score(:", "SyntaxError"),
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("import sys; sys.exit()", r"it ended the process: SystemExit\(\)"),
    ],
)
@pytest.mark.parametrize("function, workers", [("broken.py:score", None), ("broken:score", None), ("broken:score", 0)])
def test_a_module_that_fails_to_load_is_an_error_with_its_cause(tmp_path, source, reason, function, workers):
    (tmp_path / "broken.py").write_text(source)
    with pytest.raises(RewardError, match=rf"^reward\.function = '{function}': .* failed, .*{reason}") as caught:
        make_scorer(FunctionRewardOptions(function=function, num_workers=workers))
    assert isinstance(caught.value.__cause__, Exception | SystemExit)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("on_error, reward", [("zero", 0.0), ("exclude", None), ("fail", "refused")])
def test_a_function_that_would_end_the_run_is_one_that_fails(tmp_path, batched, on_error, reward):
    (tmp_path / "leaves.py").write_text("def score(given): raise SystemExit(3)")
    options = FunctionRewardOptions(function="leaves.py:score", on_error=on_error, batched=batched)
    if reward == "refused":
        with pytest.raises(RewardError, match=r"raised RuntimeError: SystemExit\(3\), which would have ended the run"):
            make_scorer(options)([make_rollout("a")])
    else:
        assert make_scorer(options)([make_rollout("a")]).rollouts[0].reward == reward
