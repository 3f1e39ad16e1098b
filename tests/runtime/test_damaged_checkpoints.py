"""Whatever becomes of the files of checkpoints, a run goes on from the newest one that is as it was written, says what is wrong
with later ones, and touches no other; or there is one message."""

import json
import re
import shutil
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
from commands.small_runs import same_weights, small_once, strop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.runtime.checkpoints import Keep, find_checkpoint, newest_checkpoint, write_checkpoint
from strop.types import UserError

STATE = {"cursor": {"pass": 1}, "config": {"seed": 0}, "num_steps": 99, "best_step": 4}
FILES = {"weights.safetensors": 96, "optimizer.safetensors": 192, "trainer.json": 40, "random.json": 60}
STEPS = (2, 4, 6)
DEEP = b"[" * 100_000


def write(folder, step, keep):
    def save(beside):
        for name, size in FILES.items():
            (beside / name).write_bytes(bytes((step + i) % 256 for i in range(size)))
        (beside / f"only_in_{step}.json").write_text("{}")

    return write_checkpoint(folder, step, save=save, state=STATE, keep=keep)


# ---- damage ----------------------------------------------------------------------------------------------------------


def truncate(folder, path, other, number):
    path.write_bytes(path.read_bytes()[: number % (path.stat().st_size or 1)])


def flip(folder, path, other, number):
    content = bytearray(path.read_bytes())
    if content:
        content[number % len(content)] ^= 1 << number % 8
    path.write_bytes(content)


def remove(folder, path, other, number):
    path.unlink()


def empty(folder, path, other, number):
    path.write_bytes(b"")


def swap(folder, path, other, number):
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


def add(folder, path, other, number):
    """A file of another checkpoint's."""
    target = path.parent / other.name
    if not target.exists():
        target.write_bytes(other.read_bytes())


def be_a_folder(folder, path, other, number):
    path.unlink()
    path.mkdir()


def be_other_text(folder, path, other, number):
    path.write_bytes(
        (DEEP, b"null", b"[]", b'{"files": 3, "sha256": 1}', b"\xff\xfe", b"9" * 5000, b'{"files": []}')[number % 7]
    )


def be_a_link(folder, path, other, number):
    path.unlink()
    path.symlink_to("nowhere")


def rename(folder, path, other, number):
    target = folder / f"step_{(3, 4, 9, 6)[number % 4]:06d}"
    if not target.exists():
        path.parent.rename(target)


def lose(folder, path, other, number):
    shutil.rmtree(path.parent)


def be_no_folder(folder, path, other, number):
    shutil.rmtree(path.parent)
    path.parent.write_text("a file")


def strange_name(folder, path, other, number):
    (folder / ("step_²", "step_", "step_x", "step_000007", ".step_000006.new")[number % 5]).mkdir(exist_ok=True)


DAMAGE = (truncate, flip, remove, empty, swap, add, be_a_folder, be_other_text, be_a_link)
DAMAGE = (*DAMAGE, rename, lose, be_no_folder, strange_name)
PLACES = st.tuples(st.sampled_from(STEPS), st.integers(0, len(FILES) + 1))
DAMAGES = st.lists(st.tuples(st.sampled_from(DAMAGE), PLACES, PLACES, st.integers(0, 10**6)), min_size=1, max_size=5)


def do(folder, damages):
    for damage, (step, place), (other_step, other_place), number in damages:
        files = [sorted((folder / f"step_{s:06d}").glob("*")) for s in (step, other_step)]
        paths = [found[n % len(found)] for found, n in zip(files, (place, other_place), strict=True) if found]
        if len(paths) == 2 and all(path.is_file() for path in paths):
            damage(folder, *paths, number)


def tree(folder):
    def seen(path):
        return "folder" if path.is_dir() else path.read_bytes() if path.exists() else "nothing"

    return {str(path.relative_to(folder)): seen(path) for path in sorted(folder.rglob("*"))}


def is_as_it_was(path, was):
    """The state may be written in another way; nothing else may be otherwise."""
    now = tree(path) if path.is_dir() else {}
    try:
        is_same_state = json.loads(now.pop("run.json")) == json.loads(was["run.json"])
    except (KeyError, ValueError, RecursionError, AttributeError, TypeError):
        return False
    return is_same_state and now == {name: content for name, content in was.items() if name != "run.json"}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    for step in STEPS:
        write(folder, step, Keep(9))
    return folder


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damages=DAMAGES)
def test_the_newest_checkpoint_that_is_as_it_was_written_is_found_and_nothing_is_touched(written, damages):
    with tempfile.TemporaryDirectory() as name:
        folder, warnings = Path(name) / "checkpoints", []
        shutil.copytree(written, folder)
        do(folder, damages)
        before = tree(folder)
        paths = {step: folder / f"step_{step:06d}" for step in STEPS}
        whole = [step for step, path in paths.items() if is_as_it_was(path, tree(written / path.name))]
        if whole:
            found, state = newest_checkpoint(folder, warn=warnings.append)
            assert found == paths[whole[-1]]
            assert state["cursor"] == STATE["cursor"]
        else:
            with pytest.raises(UserError, match="there is no complete checkpoint to resume from"):
                newest_checkpoint(folder, warn=warnings.append)
        assert tree(folder) == before
        newest = max(whole, default=0)
        later = [
            path.name for path in folder.glob("step_*") if path.name[5:].isdecimal() and int(path.name[5:]) > newest
        ]
        said = [re.match(r"checkpoint (step_\d+) is passed over: .", text)[1] for text in warnings]
        assert sorted(said) == sorted(later)

        for which in ("step_000004", "best"):
            with nullcontext() if 4 in whole else pytest.raises(UserError):
                assert find_checkpoint(folder, which, warn=warnings.append)[0] == paths[4]
        written_next = write(folder, newest + 2, Keep(2))  # a damaged one must not count among those that stay
        assert newest_checkpoint(folder, warn=warnings.append)[0] == written_next
        for step in whole[-1:]:
            assert is_as_it_was(paths[step], tree(written / paths[step].name))


# ---- through the command ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


FLAGS = ("--num-steps", "3", "--checkpoint-every-steps", "1", "--keep-checkpoints", "3", "--run.folder")


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    run = tmp_path_factory.mktemp("run") / "run"
    assert strop("train", small.train, *FLAGS, run).code == 0
    return run


def test_a_run_with_damaged_checkpoints_ends_as_it_would_have(small, run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    be_other_text(copy, copy / "checkpoints/step_000003/run.json", None, 0)
    first = copy / "checkpoints/step_000001/random.json"
    add(copy, copy / "checkpoints/step_000002/run.json", first.rename(first.with_name("waiting.jsonl")), 0)
    before = tree(copy)
    done = strop("train", small.train, *FLAGS, copy, "--resume")
    assert done.code == 2
    assert done.err.count("\n") == 1, done.err
    assert "there is no complete checkpoint to resume from" in done.err
    for step, reason in (
        (3, "run.json is broken (Rec"),
        (2, "waiting.jsonl was not written"),
        (1, "random.json is miss"),
    ):
        assert f"step_00000{step} is passed over: {reason}" in done.out
    assert tree(copy) == before
    (copy / "checkpoints/step_000002/waiting.jsonl").unlink()
    done = strop("train", small.train, *FLAGS, copy, "--resume")
    assert done.code == 0, done.err
    assert f"resumed from {copy}/checkpoints/step_000002" in done.out
    assert same_weights(copy / "model", run / "model")
