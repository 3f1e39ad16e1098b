"""Every option of strop sft moves something in a small run, or is refused; none is accepted and then ignored.

The options, and other values for each, are read off the tree itself, so a new option is tested the day it is added.
"""

import json
import shutil
from functools import cache

import pytest
from commands.sft_runs import conversation, write_sft_small

import strop
from strop.config import SFTConfig, make_config, tree
from strop.observe.console import QuietConsole
from strop.runtime.audit.variations import other_values
from strop.types import StropError


class Listening(QuietConsole):
    def __init__(self):
        super().__init__()
        self.lines = []

    def warn(self, text):
        self.lines.append(text)


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    """Another run.folder is a name, below wherever the run is started."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The small model, and two files that hold something for every option: conversations and pairs under names of their own,
    a broken line, the same as Parquet, and rows that are longer than the others."""
    import pyarrow
    from pyarrow import parquet

    folder = write_sft_small(tmp_path_factory.mktemp("sft"))
    rows = [{"messages": conversation(n)} for n in range(6)] + [{"prompt": c, "response": c * 9} for c in "abc"]
    for name in ("data", "validation.data"):
        lines = [json.dumps(row) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        (folder / f"{name}-broken.jsonl").write_text("\n".join([*lines, "{"]))
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")
    return folder


def base(folder):
    """Values under which an option may act; the rate is high and epsilon large, so that sizes show in the weights."""
    return {
        "model.path": str(folder / "start"),
        "data.path": "data.jsonl",
        "data.batch_size": 4,
        "data.max_length_tokens": 60,
        "validation.data.path": "validation.data.jsonl",
        "validation.every_steps": 2,
        "validation.data.max_length_tokens": 60,
        "trainer.lr": 0.1,
        "trainer.num_threads": 1,
        "run.folder": str(folder / "run"),
        "run.checkpoint_every_steps": 1,
        "run.num_epochs": 2,
    }


# What has to be so for an option to act, where that is not so in the base.
SCENARIOS = {
    "": {},
    "a limit that is passed": {"data.max_length_tokens": 48, "validation.data.max_length_tokens": 48},
    "what is too long is left out": {
        f"{table}.{name}": value
        for table in ("data", "validation.data")
        for name, value in (("max_length_tokens", 48), ("too_long", "drop"))
    },
    "a broken line": {"data.path": "data-broken.jsonl"},
    "a broken held-out line": {"validation.data.path": "validation.data-broken.jsonl"},
    "Parquet": {"data.path": "data.parquet", "validation.data.path": "validation.data.parquet"},
    "a run in the folder": {"run.overwrite": False},
    "a validation between two checkpoints": {"run.checkpoint_every_steps": 100, "validation.every_steps": 1},
    "a loss that only rises": {"trainer.lr": 5.0, "validation.every_steps": 1},
}


def outcome(folder, values):
    """What a run did and left, or the error that it ended with."""
    values = {n: str(folder / v) if n.endswith("data.path") else v for n, v in values.items()}
    console = Listening()
    try:
        config = make_config(SFTConfig, {}, values, file="audit.toml")
        result = strop.sft(config, console=console)
    except StropError as error:
        return {"error": str(error), "files": sorted(p.name for p in folder.glob("run*"))}
    finally:
        written = sorted(str(p.relative_to(folder)) for p in folder.glob("run*/**/*") if p.is_file())
        model = {p.name: p.read_bytes() for p in sorted(folder.glob("run*/model/*.safetensors"))}
        for path in folder.glob("run*"):
            shutil.rmtree(path)
    steps = [
        {k: v for k, v in row.items() if not k.startswith("seconds/") and k != "tokens_per_second"}
        for row in result.steps
    ]
    return {"files": written, "model": model, "steps": repr(steps), "best": result.best, "said": console.lines}


def in_scenario(folder, name, changed):
    if name == "a run in the folder":
        (folder / "run").mkdir()
        (folder / "run/metrics.jsonl").write_text("")
    return outcome(folder, base(folder) | SCENARIOS[name] | changed)


@pytest.fixture(scope="module")
def unchanged(folder):
    return cache(lambda name: in_scenario(folder, name, {}))


def values_for(folder, path):
    config = make_config(SFTConfig, {}, base(folder), file="audit.toml")
    leaf = tree.leaf_of(config, path)
    found = other_values(leaf, tree.values(config)[path])
    if path == "trainer.num_threads":
        return [None]
    return ["cpu:0", "meta"] if path == "model.device" else found


CONFIG_PATHS = [path for path in tree.paths(SFTConfig) if path != "validation.data"]
# What no run on this machine shows: another device, code of a model folder (strop audit shows it), one CPU thread or two; and
# what changes work and memory alone.
ELSEWHERE = ("trainer.activation_checkpointing", "model.device", "model.trust_remote_code", "trainer.num_threads")
ELSEWHERE += ("trainer.num_processes", "trainer.process_timeout_s")


@pytest.mark.parametrize("path", [p for p in CONFIG_PATHS if p not in ELSEWHERE])
def test_an_option_of_sft_moves_something_or_is_refused(folder, unchanged, path):
    others = values_for(folder, path)
    if not others:
        assert path == "trainer.kind"  # a word with one value
        return
    for name in SCENARIOS:
        for other in others:
            if in_scenario(folder, name, {path: other}) != unchanged(name):
                return
    pytest.fail(f"{path} = {others} moved nothing")


def test_the_same_run_twice_leaves_the_same(folder, unchanged):
    # otherwise every option would seem to move something
    assert in_scenario(folder, "", {}) == unchanged("")
    assert "error" not in unchanged("")


def test_the_table_of_held_out_demonstrations_acts_by_being_there(folder, unchanged):
    given = {path: value for path, value in base(folder).items() if not path.startswith("validation.")}
    assert outcome(folder, given) != unchanged("")
