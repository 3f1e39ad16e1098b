"""The quickstart, run for real as its README says, reaches what it promises."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """(what run.py printed, the folder that it ran in), seed 0."""
    folder = tmp_path_factory.mktemp("quickstart")
    command = [sys.executable, str(ROOT / "examples/quickstart/run.py"), "--seed", "0"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout, folder


@pytest.fixture(scope="module")
def accuracy(quickstart):
    """(before, after) of the printed table by the kind of answer."""
    found = re.findall(r"(greedy|sampled)\D+(\d\.\d{3})\D+(\d\.\d{3})", quickstart[0].split("held-out accuracy")[1])
    return {name: (float(before), float(after)) for name, before, after in found}


def test_the_table_shows_how_sampled_held_out_accuracy_rises(accuracy):
    before, after = accuracy["sampled"]
    assert before <= 0.45
    assert after - before >= 0.35


def test_greedy_held_out_accuracy_does_not_fall(accuracy):
    before, after = accuracy["greedy"]
    assert after >= before


def test_the_table_agrees_with_the_run_s_own_evaluations(quickstart, accuracy):
    folder = quickstart[1] / "runs/quickstart/cispo"
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 80
    assert accuracy["sampled"][1] == round(last["eval/sampled_reward"], 3)
    assert accuracy["greedy"][1] == round(last["eval/greedy_reward"], 3)
    first = [json.loads(line) for line in (folder / "rollouts/eval_000000.jsonl").read_text().splitlines()]
    sampled = [row["reward"] for row in first[256:]]
    assert len(sampled) == 4 * 256
    assert accuracy["sampled"][0] == pytest.approx(sum(sampled) / len(sampled), abs=5e-4)


def test_held_out_prompts_occur_in_neither_demonstrations_nor_training_prompts(quickstart):
    folder = quickstart[1] / "runs/quickstart"

    def prompts(name):
        return [json.loads(line)["prompt"] for line in (folder / name).read_text().splitlines()]

    held_out = prompts("held_out.jsonl")
    assert len(set(held_out)) == 256
    assert set(held_out).isdisjoint(prompts("train.jsonl"))
    assert set(held_out).isdisjoint(prompts("demonstrations.jsonl"))
    assert len(prompts("train.jsonl")) == 8**3 + 8**4 - 256


def test_the_labels_are_the_reversed_prompts(quickstart):
    folder = quickstart[1] / "runs/quickstart"
    for name in ("held_out.jsonl", "train.jsonl"):
        for line in (folder / name).read_text().splitlines():
            row = json.loads(line)
            assert row["label"] + "=" == row["prompt"][-2::-1] + "="


def test_the_printed_commands_are_those_a_reader_can_type(quickstart):
    text = quickstart[0]
    commands = [line for line in text.splitlines() if line.startswith("$ strop ")]
    assert [line.split()[2] for line in commands] == ["sft", "train"]
    for name in ("model", "report.html"):
        assert f"runs/quickstart/cispo/{name}" in text
        assert (quickstart[1] / "runs/quickstart/cispo" / name).exists()
