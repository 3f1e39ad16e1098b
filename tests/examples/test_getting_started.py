"""Getting started, followed for real from its first command to its last: on a model of two layers, with fewer and
shorter responses and fewer steps, everything else as the page has it."""

import contextlib
import json
import re
import string

import pytest
from commands.small_runs import read_lines, strop, write_model, write_tokenizer
from examples.doc_pages import ROOT, Block, blocks, commands

pytestmark = pytest.mark.long
PAGE = ROOT / "docs/en/getting-started.md"
# What the page has, and what stands in for it here.
SMALLER = {
    "run.toml": {
        '"HuggingFaceTB/SmolLM2-135M-Instruct"': '"tiny"',
        "prompts_per_step = 16": "prompts_per_step = 4",
        "group_size = 8": "group_size = 4",
        "max_response_tokens = 256": "max_response_tokens = 6",
        "lr = 1e-6": "lr = 1e-6\nnum_threads = 1",
        "num_steps = 200": "num_steps = 4",
        "checkpoint_every_steps = 20": "checkpoint_every_steps = 2",
    },
    "sft.toml": {
        '"HuggingFaceTB/SmolLM2-135M"': '"tiny"',
        "batch_size = 64": "batch_size = 8",
        "[run]\nnum_steps = 300": "[trainer]\nnum_threads = 1\n[run]\nnum_steps = 3",
    },
}


def write_files(folder):
    """A model, and files of 8 lines like the one that the page shows."""
    characters = string.ascii_letters + string.digits + " *?"
    write_model(folder / "tiny", vocab_size=write_tokenizer(folder / "tiny", characters))
    tasks = [(f"What is {a} * 8?", str(a * 8)) for a in range(1, 9)]
    for name, answer in (("train", "label"), ("held_out", "label"), ("demonstrations", "response")):
        lines = [json.dumps({"prompt": prompt, answer: right}) + "\n" for prompt, right in tasks]
        (folder / f"{name}.jsonl").write_text("".join(lines))


def write_config(block):
    text = block.code
    for old, new in SMALLER[block.file].items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    with open(block.file, "w") as file:
        file.write(text)


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """(the folder, what each command printed, the names that the programs left)."""
    folder, printed, names = tmp_path_factory.mktemp("reader"), [], {}
    write_files(folder)
    with contextlib.chdir(folder):
        for item in sorted([*blocks(PAGE), *commands(PAGE)], key=lambda item: item.offset):
            if not isinstance(item, Block):
                done = strop(*item.words)
                assert done.code == 0, (item.where, done.err)
                printed.append((item.words, done.out))
            elif item.language == "python":
                exec(compile(item.code, item.where, "exec"), names)
            elif item.language == "toml" and item.file:
                write_config(item)
    return folder, printed, names


def test_every_command_and_program_of_the_page_works_in_its_order(followed):
    _, printed, names = followed
    kinds = [words[0] for words, _ in printed]
    assert kinds == ["doctor", "explain", "train", "train", "train", "eval", "help", "explain", "audit", "sft", "train"]
    assert [row["step"] for row in names["result"].steps] == list(range(21))  # 0: the evaluation before the first
    assert set(names["evaluation"].scores) == {"greedy", "sampled"}
    assert names["loss"].requires_grad


def test_a_run_writes_the_folder_that_the_config_s_name_or_the_flag_says(followed):
    runs = followed[0] / "runs"
    assert {path.name for path in runs.iterdir()} == {"run", "clip", "short", "sft", "after-sft"}
    steps = {
        name: [row["step"] for row in read_lines(runs / name / "metrics.jsonl")] for name in ("run", "clip", "sft")
    }
    assert steps == {"run": [0, 1, 2, 3, 4], "clip": [0, 1, 2, 3, 4], "sft": [1, 2, 3]}
    assert len(read_lines(runs / "after-sft/metrics.jsonl")) == 5


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_run_folder_holds_what_the_page_lists(followed, language):
    (tree,) = [b for b in blocks(ROOT / f"docs/{language}/while-it-runs.md") if b.code.startswith("runs/run/")]
    listed = {re.split(r"[ :]", line.strip())[0] for line in tree.code.splitlines()[1:]}
    # of runs in which a guard acted, that were resumed with a change, or whose steps were profiled
    of_others = {"guards/", "changes.jsonl", "profile/"}
    assert listed >= of_others
    run = followed[0] / "runs/run"
    assert listed - of_others == {f"{path.name}/" if path.is_dir() else path.name for path in run.iterdir()}
    (rollouts,) = [line for line in tree.code.splitlines() if line.strip().startswith("rollouts/")]
    files = re.findall(r"(?:step|eval)_\d+\.jsonl", rollouts)
    assert len(files) == 2
    assert all((run / "rollouts" / file).exists() for file in files)


def test_a_finished_run_is_trained_further_by_resuming_it_with_more_steps(followed):
    folder, *_ = followed
    with contextlib.chdir(folder):
        done = strop(
            "train", "run.toml", "--resume", "--run.folder", "runs/clip", "--num-steps", "6", "--eps-clip-high", "3.0"
        )
    assert done.code == 0, done.err
    assert [row["step"] for row in read_lines(folder / "runs/clip/metrics.jsonl")] == [0, 1, 2, 3, 4, 5, 6]


def test_a_saved_config_runs_again_and_may_be_given_a_folder_of_its_own(followed):
    folder, *_ = followed
    with contextlib.chdir(folder):
        again = ("--num-steps", "1", "--save-rollouts", "false", "--run.folder", "runs/again")
        done = strop("train", "runs/run/config.toml", *again)
        assert done.code == 0, done.err
        assert "holds a run already" in strop("train", "runs/run/config.toml").err
    assert (folder / "runs/again/model/config.json").exists()
    assert list((folder / "runs/again/rollouts").iterdir()) == []
