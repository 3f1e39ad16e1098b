"""metrics.jsonl: written line by line, read back whole."""

import json
import math

import pytest

from strop.observe.metrics_file import append_metrics, drop_metrics_after, read_metrics


@pytest.fixture
def path(tmp_path):
    """Three steps."""
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        append_metrics(path, {"step": step, "reward": step / 3})
    return path


def test_what_is_written_is_read_back_bit_for_bit(path):
    assert read_metrics(path) == [{"step": step, "reward": step / 3} for step in (1, 2, 3)]


def test_numbers_that_json_has_no_word_for_are_null_and_read_as_nan(path):
    append_metrics(path, {"step": 4, "reward": math.nan, "ratio_max": math.inf})
    last = path.read_text().splitlines()[-1]
    assert json.loads(last, parse_constant=lambda name: pytest.fail(name)) == {
        "step": 4,
        "reward": None,
        "ratio_max": None,
    }
    assert math.isnan(read_metrics(path)[-1]["reward"])


def test_a_line_that_a_crash_cut_short_is_left_out(path):
    path.write_text(path.read_text()[:-5])
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


def test_lines_after_a_step_are_dropped_and_the_others_stay_as_they_were(path):
    before = path.read_text().splitlines(keepends=True)
    drop_metrics_after(path, 2)
    assert path.read_text() == "".join(before[:2])
    append_metrics(path, {"step": 3, "reward": 0.5})
    assert [row["reward"] for row in read_metrics(path)] == [1 / 3, 2 / 3, 0.5]


def test_where_there_is_no_file_there_are_no_rows(tmp_path):
    assert read_metrics(tmp_path / "nothing.jsonl") == []
    drop_metrics_after(tmp_path / "nothing.jsonl", 2)
    assert not (tmp_path / "nothing.jsonl").exists()
