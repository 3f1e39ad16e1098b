"""Help and wrong options are answered at once: torch and transformers are not even imported for them."""

import json
import subprocess
import sys

import pytest
from commands.small_runs import ENVIRONMENT, small_once, strop, strop_process

from strop.config import SFTConfig


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


# Runs the entry point and prints, last, its exit code and which heavy libraries it imported.
_WATCHED = """
import json, sys
from strop.cli import main
code = 0
try:
    main()
except SystemExit as ended:
    code = ended.code
heavy = sorted({"torch", "transformers", "numpy", "pyarrow", "math_verify"} & set(sys.modules))
print(json.dumps([code, heavy]))
"""


def watched(*arguments):
    """(exit code, heavy libraries imported, stdout, stderr) of a command."""
    command = [sys.executable, "-c", _WATCHED, *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    *lines, last = done.stdout.splitlines()
    code, heavy = json.loads(last)
    return code, heavy, "\n".join(lines), done.stderr


@pytest.mark.parametrize(
    "arguments, promised",
    [
        (["--help"], ["train", "sft", "eval", "explain", "doctor"]),
        (["train", "--help"], ["--resume", "--OPTION VALUE", "strop explain"]),
    ],
)
def test_help_names_what_there_is_without_importing_torch(arguments, promised):
    code, heavy, out, err = watched(*arguments)
    assert (code, heavy, err) == (0, [], "")
    assert [word for word in promised if word not in out] == []


def test_an_option_error_comes_without_importing_torch(small, tmp_path):
    folder = tmp_path / "run"
    code, heavy, out, err = watched("train", small.train, "--rollout.group_sise", "4", "--run.folder", folder)
    assert (code, heavy, out) == (2, [], "")
    assert "group_size" in err
    assert not folder.exists()


@pytest.mark.parametrize("command", ["train", "sft", "eval", "explain", "audit", "help", "schema", "doctor"])
def test_every_command_has_a_help_of_its_own(command):
    done = strop(command, "--help")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("Usage:")


def test_the_version_is_printed():
    from strop import __version__

    assert strop("--version").out.strip().endswith(__version__)


def test_an_unknown_command_is_refused_with_the_list_or_its_name():
    done = strop("trian", "config.toml")
    assert done.code == 2
    assert "trian" in done.err
    assert "Traceback" not in done.err


def test_a_command_in_a_process_of_its_own_exits_with_2_and_no_traceback(tmp_path):
    done = strop_process("train", "nothing.toml", cwd=tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: nothing.toml: there is no such config file.\n"


def test_help_finds_options_and_says_what_they_take():
    done = strop("help", "eps_clip_c")
    assert done.code == 0
    assert done.out.splitlines()[0] == '[algorithm.policy_loss]  with kind = "ppo_clip"'
    assert "eps_clip_c  number, > 1 | none, default none" in done.out
    assert strop("help", "no such thing").code == 2


def test_schema_prints_json():
    done = strop("schema", "--sft")
    assert done.code == 0
    assert json.loads(done.out)["properties"].keys() == SFTConfig.model_fields.keys()


def test_explain_diff_shows_only_what_differs_with_origins(small, tmp_path):
    (tmp_path / "other.toml").write_text(small.train.read_text().replace("lr = 0.01", "lr = 0.02"))
    done = strop("explain", small.train, "--eps-clip", "0.3", "--diff", tmp_path / "other.toml")
    assert done.code == 0, done.err
    words = " ".join(done.out.split())
    assert "trainer.lr 0.01" in words
    assert "0.02" in words
    assert "algorithm.policy_loss.eps_clip 0.3" in words
    assert "rollout.group_size" not in words
    same = strop("explain", small.train, "--diff", small.train)
    assert "No option differs." in same.out
