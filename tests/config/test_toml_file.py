"""A file that is no TOML, or no text, is refused with file, line, column and reason."""

import pytest

from strop.config.toml_file import read_toml
from strop.types import ConfigError


@pytest.mark.parametrize(
    "raw, says",
    [
        (b"[a]\nx = [1, 2\n", ", line 2, column 1: is not valid TOML: Unclosed array."),
        (b'[a]\nx = """abc\n\ny=1\n', ", line 2, column 1: is not valid TOML: Unterminated string."),
        (b"[a]\nx=1\nx = 2\n", ", line 3, column 6: is not valid TOML: x is set already."),
        (b"a=1\n[a]\n", ", line 2, column 3: is not valid TOML: [a] is set already."),
        (b"[m]\n[m]\n", ", line 2, column 3: is not valid TOML: Cannot declare ('m',) twice."),
        (b"[a]\nx = \n", ", line 2, column 5: is not valid TOML: Invalid value."),
        (
            b"a = 1\n  b = [1,\n 2,, 3]\n",
            ", line 3, column 4 (in what begins in line 2): is not valid TOML: Invalid value.",
        ),
        (b"[a]\nx = " + b"9" * 5000, ", line 2, column 1: is not valid TOML: Exceeds the limit"),
        (b"# a\nk = tr\xf6\n", ", line 2, column 7: is not text in UTF-8, byte 0xf6. Save it as UTF-8."),
        ("x = 'a'".encode("utf-16"), ": is not text in UTF-8 (UTF-16, or no text at all). Save it as UTF-8."),
        ("x = 'a'".encode("utf-16-le"), ": is not text in UTF-8 (UTF-16, or no text at all). Save it as UTF-8."),
        (b"x = " + b"[" * 5000, ": is nested too deeply."),
    ],
)
def test_what_is_no_toml_says_where_and_why(tmp_path, raw, says):
    path = tmp_path / "run.toml"
    path.write_bytes(raw)
    with pytest.raises(ConfigError) as caught:
        read_toml(path)
    assert str(caught.value).startswith(f"{path}{says}")


def test_a_folder_a_missing_file_and_an_impossible_name_are_refused_each_in_one_line(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").touch()
    wanted = {
        tmp_path: "is a folder. Name a config file.",
        tmp_path / "run": f"is a folder. Name a config file, such as {tmp_path}/run/config.toml.",
        tmp_path / "no.toml": "there is no such config file.",
        tmp_path / "a\nb.toml": "there is no such config file.",
        tmp_path / "a\0b.toml": "cannot be read: embedded null byte.",
    }
    for path, says in wanted.items():
        with pytest.raises(ConfigError) as caught:
            read_toml(path)
        assert str(caught.value).endswith(says)
        assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_accepted(tmp_path):
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbfx = 1\n")
    assert read_toml(tmp_path / "run.toml")[0] == {"x": 1}


def test_a_large_file_of_something_else_is_refused_soon(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('{"a": 1}\n' * 50_000)
    with pytest.raises(ConfigError, match="line 1, column 1: is not valid TOML"):
        read_toml(path)
