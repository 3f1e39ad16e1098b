"""Killed at any moment, or out of disk, a run loses at most the steps since its last checkpoint, and no checkpoint is ever
damaged. tools/soak.py does the same to many steps of the quickstart."""

import importlib.util
import random
import resource
import subprocess
import sys
from functools import partial

import pytest
from commands.small_runs import ENVIRONMENT, ROOT, metrics, same_weights, small_once, strop
from forked import Command

from strop.runtime.checkpoints import newest_checkpoint

pytestmark = pytest.mark.long
NUM_KILLS = 20
PROGRAM = """
import random, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import soak, strop

toml, folder, seed, kills = sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
options = {"run.folder": str(folder), "run.checkpoint_every_steps": 1, "run.num_steps": int(sys.argv[6])}
config = strop.load_config(toml, options)
account = soak.torment(config, folder, num_faults=kills, rng=random.Random(seed))
print(dict(account.faults), "steps lost", account.steps_lost)
assert max(account.steps_lost) <= 2, account.steps_lost
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak", ROOT / "tools/soak.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_run_that_is_killed_twenty_times_ends_as_one_that_is_not(small, soak, tmp_path):
    """In sampling, scoring, training, saving and while it starts. A step that is made is in a checkpoint one step later,
    except that the one being written may be lost with it."""
    seed, num_steps = random.SystemRandom().randrange(10**6), "30"
    arguments = (ROOT / "tools", small.train, tmp_path / "run", seed, NUM_KILLS, num_steps)
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    print(f"seed {seed}: {done.stdout}")
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    whole = tmp_path / "whole"
    assert strop("train", small.train, "--num-steps", num_steps, "--run.folder", whole).code == 0
    assert soak.differences(tmp_path / "run", whole) == [], f"seed {seed}"


def test_a_full_disk_ends_the_run_with_a_message_and_a_resume_once_there_is_room_goes_on(small, tmp_path):
    """No file may have more bytes than the weights: the optimizer's, of twice as many, breaks off in the middle."""
    flags = ("--checkpoint-every-steps", "1", "--run.folder")
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert strop("train", small.train, *flags, whole, "--num-steps", "5").code == 0
    assert strop("train", small.train, *flags, run, "--num-steps", "2").code == 0
    most = (run / "checkpoints/step_000002/weights.safetensors").stat().st_size
    prepare = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (most, most))
    with Command(tmp_path, "train", small.train, *flags, run, "--num-steps", "5", "--resume", prepare=prepare) as done:
        assert done.wait() == 2, done.out + done.err
    assert "the checkpoint cannot be written" in done.err
    assert "File too large" in done.err
    assert "Traceback" not in done.err
    assert newest_checkpoint(run / "checkpoints", warn=pytest.fail)[0].name == "step_000002"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000001", "step_000002"]
    assert strop("train", small.train, *flags, run, "--num-steps", "5", "--resume").code == 0
    assert same_weights(run / "model", whole / "model")
    assert metrics(run) == metrics(whole)
