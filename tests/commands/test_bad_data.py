"""Each kind of bad data: one message with file, physical line and reason, exit code 2, nothing written."""

import json

import pytest
from commands.small_runs import refusing, small_once, strop


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.fixture
def refused(tmp_path):
    return refusing(tmp_path)


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_missing_data_file_is_named(small, refused, command, tmp_path):
    message = refused(command, getattr(small, command), "--data.path", tmp_path / "nothing.jsonl")
    assert f"{tmp_path}/nothing.jsonl: there is no such file" in message


@pytest.mark.parametrize("command", ["train", "sft"])
@pytest.mark.parametrize("broken", ['{"prompt": ', "[]", '"text"', "null", '{"prompt": 3, "response": "a"}'])
def test_a_broken_line_of_data_is_named_by_file_and_physical_line(small, refused, command, broken, tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text(f'\n{{"prompt": "abc=", "label": "cba", "response": "cba"}}\n\n{broken}\n')
    assert f"{path}, line 4" in refused(command, getattr(small, command), "--data.path", path)


def test_broken_lines_are_left_out_only_when_asked_and_counted(small, tmp_path):
    path = tmp_path / "broken.jsonl"
    rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("abc=", "cab=", "bca=", "acb="))
    path.write_text(rows + "[]\nnull\n")
    flags = ("--data.path", path, "--data.skip_bad_lines", "true", "--num-steps", "1")
    done = strop("train", small.train, *flags, "--run.folder", tmp_path / "run")
    assert done.code == 0, done.err
    assert "warning: data: 2 broken lines were left out" in done.out


def test_a_broken_line_of_held_out_data_is_named(small, refused, tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "abc="}\n{')
    assert f"{path}, line 2" in refused("train", small.train, "--eval.data.kind", "jsonl", "--eval.data.path", path)


@pytest.mark.parametrize(
    "kind, label, says",
    [
        ("exact", "null", "there must be a label for reward.kind = exact, got none"),
        ("math", '""', "the label must be an answer for reward.kind = math, got empty text"),
        ("number", '"five"', "the label must be a number for reward.kind = number, got 'five'"),
        ("number", "1e999", "1e999 is larger than any 64-bit number"),
        *((kind, "[1]", "the label must be text or a finite number") for kind in ("exact", "number", "math")),
        *((kind, "true", "the label must be text or a finite number") for kind in ("exact", "number", "math")),
        *((kind, '{"a": 1}', "the label must be text or a finite number") for kind in ("exact", "number", "math")),
    ],
)
def test_a_label_that_the_reward_cannot_use_is_named_by_file_and_line_before_the_run(
    small, refused, tmp_path, kind, label, says
):
    path = tmp_path / "labels.jsonl"
    path.write_text('{"prompt": "abc=", "label": "7"}\n\n{"prompt": "abc=", "label": LABEL}\n'.replace("LABEL", label))
    message = refused("train", small.exact, "--reward.kind", kind, "--data.path", path)
    assert f"{path}, line 3: {says}" in message
    done = strop("eval", small.exact, "--reward.kind", kind, "--eval.data.kind", "jsonl", "--eval.data.path", path)
    assert f"{path}, line 3: {says}" in done.err


@pytest.mark.parametrize("label", ["7", '"7"', "7.5", "9" * 400])
def test_labels_that_are_text_or_numbers_are_taken(small, tmp_path, label):
    path = tmp_path / "labels.jsonl"
    path.write_text('{"prompt": "abc=", "label": LABEL}\r\n'.replace("LABEL", label))
    for kind in ("exact", "number", "math"):
        flags = ("--reward.kind", kind, "--eval.data.kind", "jsonl", "--eval.data.path", path)
        assert strop("eval", small.exact, *flags).code == 0


def test_eval_counts_the_broken_lines_that_it_leaves_out(small, tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "abc="}\n[]\nnull\n')
    flags = ("--eval.data.kind", "jsonl", "--eval.data.path", path, "--eval.data.skip_bad_lines", "true")
    done = strop("eval", small.train, *flags)
    assert done.code == 0, done.err
    assert "eval.data: 2 broken lines were left out" in done.out
    as_json = strop("eval", small.train, *flags, "--json")
    assert "eval.data: 2 broken lines were left out" in as_json.err
    assert json.loads(as_json.out)["greedy"]["num_prompts"] == 1


def test_a_missing_column_is_named_with_those_that_are_there(small, refused):
    message = refused("train", small.train, "--data.prompt-key", "question")
    assert "line 1" in message
    assert "'question'" in message
    assert "'prompt'" in message
