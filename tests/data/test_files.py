"""Files: a broken line is an error with its physical place, never a silent loss."""

import gzip
import json
import time

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from strop.data.files import read_jsonl, read_parquet
from strop.types import DataError

VALID = b'{"prompt": "a"}'


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(content)
        return path

    return write


def values(rows):
    return [row.values for row in rows]


@pytest.mark.parametrize(
    "line, place, reason",
    [
        (b'{"prompt": ', "line 4, column 12", "not valid JSON, Expecting value"),
        (b'{"prompt": "a"} x', "line 4, column 17", "not valid JSON, Extra data"),
        (b"[]", "line 4", "must be a JSON object, got an array"),
        (b'"text"', "line 4", "must be a JSON object, got a string"),
        (b"null", "line 4", "must be a JSON object, got null"),
        (b"3", "line 4", "must be a JSON object, got a number"),
        (b"true", "line 4", "must be a JSON object, got a boolean"),
        (b'{"\xc3\xa4": "\xff"}', "line 4, column 8", "not valid UTF-8, byte 0xff"),
        (b'{"label": NaN}', "line 4", "NaN is not JSON"),
        (b'{"label": -Infinity}', "line 4", "-Infinity is not JSON"),
        (b'{"label": [1e999]}', "line 4", "1e999 is larger than any 64-bit number"),
        (b'{"label": -1e400}', "line 4", "-1e400 is larger than any 64-bit number"),
        (b"\x00", "line 4, column 1", "not valid JSON"),
        (b'{"label": 1, "label": 2}', "line 4", "the key 'label' stands there twice"),
        (b'{"prompt": "\\ud800"}', "line 4", "a \\u escape is half of a surrogate pair"),
        (b'{"label": ' + b"9" * 5000 + b"}", "line 4", "not usable, Exceeds the limit"),
        (b'{"a": ' * 100_000, "line 4", "nested too deeply"),
        (b"[" * 100_000, "line 4", "nested too deeply"),
    ],
)
def test_a_broken_line_is_an_error_with_file_physical_line_and_reason(file, line, place, reason):
    path = file(b"\n" + VALID + b"\n  \n" + line + b"\n" + VALID + b"\n")
    with pytest.raises(DataError) as caught:
        read_jsonl(path, skip_bad_lines=False)
    assert str(caught.value).startswith(f"{path}, {place}: {reason}")

    rows, num_skipped = read_jsonl(path, skip_bad_lines=True)
    assert [row.where for row in rows] == [f"{path}, line 2", f"{path}, line 5"]
    assert num_skipped == 1


def test_blank_lines_byte_order_mark_carriage_returns_and_a_missing_last_newline_are_no_errors(file):
    path = file(b'\xef\xbb\xbf{"a": 1}\r\n\r\n \t\n{"a": "\xe2\x80\xa8"}')
    rows, num_skipped = read_jsonl(path, skip_bad_lines=False)
    assert values(rows) == [{"a": 1}, {"a": "\u2028"}]  # a Unicode line separator does not end a line
    assert rows[1].where == f"{path}, line 4"
    assert num_skipped == 0


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_a_file_without_rows_is_an_error(file, content):
    with pytest.raises(DataError, match=r"rows\.jsonl: has no rows\."):
        read_jsonl(file(content), skip_bad_lines=False)


def test_a_file_with_only_broken_lines_is_an_error_even_when_they_may_be_skipped(file):
    with pytest.raises(DataError, match="has no rows, all 2 lines are broken"):
        read_jsonl(file(b"[]\n1\n"), skip_bad_lines=True)


@pytest.mark.parametrize("read", [lambda path: read_jsonl(path, skip_bad_lines=True), read_parquet])
def test_a_file_that_is_not_there_and_a_folder_are_said_to_be_that(read, tmp_path):
    with pytest.raises(DataError, match=r"nowhere: there is no such file.*taken from /"):
        read(tmp_path / "nowhere")
    with pytest.raises(DataError, match="is a folder"):
        read(tmp_path)


@pytest.mark.parametrize(
    "content, sentence",
    [
        (gzip.compress(VALID, mtime=0), "is compressed with gzip. Unpack it first."),
        (b"\x28\xb5\x2f\xfd" + VALID, "is compressed with zstd. Unpack it first."),
        (b"PK\x03\x04" + VALID, "is a zip archive. Unpack it first."),
        (b"PAR1" + VALID, 'is a Parquet file. Set kind = "parquet".'),
        (VALID.decode().encode("utf-16"), "is text in UTF-16. Save it as UTF-8."),
    ],
)
@pytest.mark.parametrize("skip_bad_lines", [False, True])
def test_a_file_of_another_format_is_said_to_be_that(file, content, sentence, skip_bad_lines):
    path = file(content)
    with pytest.raises(DataError) as caught:
        read_jsonl(path, skip_bad_lines=skip_bad_lines)
    assert str(caught.value) == f"{path}: {sentence}"


@pytest.mark.parametrize("read", [lambda path: read_jsonl(path, skip_bad_lines=True), read_parquet])
def test_an_empty_path_is_no_folder(read):
    with pytest.raises(DataError, match="the path of a data file must be given, got ''"):
        read("")


def test_a_line_of_100_megabytes_is_read_or_refused_in_seconds(file):
    started = time.process_time()
    rows, _ = read_jsonl(file(b'{"a": "' + b"x" * 100_000_000 + b'"}\r\n' + VALID), skip_bad_lines=False)
    assert [len(rows[0].values["a"]), rows[1].values] == [100_000_000, {"prompt": "a"}]
    with pytest.raises(DataError, match="line 1, column 1: not valid JSON"):
        read_jsonl(file(b"x" * 100_000_000), skip_bad_lines=False)
    assert time.process_time() - started < 60  # a second or two; looking back from every character takes hours


def test_a_key_that_is_missing_is_an_error_with_the_keys_there_are(file):
    rows, _ = read_jsonl(file(b'\n{"question": "a", "answer": 1}'), skip_bad_lines=False)
    with pytest.raises(
        DataError, match=r"line 2: has no key 'prompt', which data\.prompt_key names.*'question', 'answer'"
    ):
        rows[0].column("prompt", "data.prompt_key")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(st.dictionaries(st.text(), json_values), min_size=1, max_size=5), st.booleans())
def test_rows_that_json_wrote_come_back_as_they_were(tmp_path_factory, written, ensure_ascii):
    path = tmp_path_factory.mktemp("jsonl") / "rows.jsonl"
    lines = [json.dumps(row, ensure_ascii=ensure_ascii) for row in written]
    path.write_bytes("\n\n".join(lines).encode())
    rows, num_skipped = read_jsonl(path, skip_bad_lines=False)
    assert values(rows) == written
    assert [row.where for row in rows] == [f"{path}, line {2 * i + 1}" for i in range(len(written))]
    assert num_skipped == 0


@given(st.lists(st.binary(max_size=20) | st.sampled_from([VALID, b"", b"[]", b'{"a"', b"PAR1", b"PK\x03\x04"])))
def test_any_bytes_give_rows_and_counts_that_add_up_or_a_data_error(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("jsonl") / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))
    num_filled = sum(bool(line.strip()) for line in path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"))
    try:
        rows, num_skipped = read_jsonl(path, skip_bad_lines=True)
    except DataError as error:
        reasons = ("has no rows", "is compressed with", "is text in UTF-16", "is a Parquet file", "is a zip archive")
        assert any(reason in str(error) for reason in reasons)  # noqa: PT017  each outcome has its own claim
    else:
        assert len(rows) + num_skipped == num_filled


def test_parquet_rows_come_back_with_lists_and_structs(tmp_path):
    written = [{"prompt": [{"role": "user", "content": "a"}], "label": 5}, {"prompt": None, "label": None}]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(written), path)
    rows = read_parquet(path)
    assert values(rows) == written
    assert rows[1].where == f"{path}, row 1"


def test_two_parquet_columns_of_one_name_are_an_error(tmp_path):
    path = tmp_path / "rows.parquet"
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    parquet.write_table(pyarrow.Table.from_arrays(columns, names=["prompt", "prompt"]), path)
    with pytest.raises(DataError, match=r"rows\.parquet: has two columns 'prompt'"):
        read_parquet(path)


def test_a_parquet_value_that_python_cannot_hold_is_an_error(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a"], "at": pyarrow.array([1], pyarrow.timestamp("ns"))}), path)
    with pytest.raises(DataError, match=r"rows\.parquet: cannot be read as Parquet, Nanosecond"):
        read_parquet(path)


def test_a_broken_or_empty_parquet_file_is_a_data_error(tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 no, it is not")
    with pytest.raises(DataError, match=r"rows\.parquet: cannot be read as Parquet"):
        read_parquet(path)
    parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), path)
    with pytest.raises(DataError, match="has no rows"):
        read_parquet(path)
