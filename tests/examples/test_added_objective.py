"""The page on adding an objective, followed in a copy of the package: its loss becomes an option, and its tests pass."""

import os
import shutil
import subprocess
import sys

import pytest
from examples.doc_pages import ROOT, blocks, commands, starting_page

PAGE = ROOT / "docs/en/objectives/add-an-objective.md"


def insert(path, text, before):
    old = path.read_text()
    assert old.count(before) == 1, (path, before)
    path.write_text(old.replace(before, text + before))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A folder with strop as it is after the page, the page's tests, and run.toml of getting started."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "strop", folder / "strop", ignore=shutil.ignore_patterns("__pycache__"))
    loss, options, formula, line, tests = [block for block in blocks(PAGE) if block.language == "python"]
    losses, config = folder / "strop/ops/policy_loss/__init__.py", folder / options.file
    variants, test_file = folder / formula.file, folder / tests.file
    (folder / loss.file).write_text(loss.code)
    insert(losses, "from strop.ops.policy_loss.spo import spo\n", before="\n__all__ = [")
    insert(losses, '    "spo",\n', before='    "topr",')
    insert(config, options.code + "\n\n", before="PolicyLossOptions = Annotated[")
    insert(config, "    SPOOptions\n    | ", before="PPOClipOptions\n    |")
    insert(variants, formula.code + "\n\n", before="POLICY_LOSSES: dict[str, Binding] = {")
    insert(variants, line.code, before='    "aspo": bind(')
    test_file.parent.mkdir(parents=True)
    test_file.write_text(tests.code)
    (run,) = [block for block in blocks(starting_page(PAGE)) if block.file == "run.toml"]
    (folder / "run.toml").write_text(run.code)
    return folder, [loss.file, tests.file]


def python(folder, *words):
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "100"}
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)


def test_the_page_s_tests_and_its_example_pass(copy):
    folder, files = copy
    done = python(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--doctest-modules", *files)
    assert "5 passed" in done.stdout, done.stdout + done.stderr


def test_the_loss_is_an_option_like_the_others_and_explained_with_its_numbers(copy):
    folder, _ = copy
    (words,) = [command.words for command in commands(PAGE) if "spo" in command.words]
    done = python(folder, "-m", "strop.cli", *words)
    assert done.returncode == 0, done.stderr
    assert "loss_t = -A_t r_t + |A_t| (r_t - 1)^2 / 0.2" in done.stdout
    assert "policy_loss.kind" in done.stdout


def test_its_bound_is_refused_where_it_cannot_act(copy):
    folder, _ = copy
    flags = [
        "--algorithm.policy_loss.kind",
        "spo",
        "--updates-per-batch",
        "1",
        "--algorithm.policy_loss.eps_clip",
        "0.1",
    ]
    done = python(folder, "-m", "strop.cli", "explain", "run.toml", *flags)
    assert done.returncode == 2
    assert "eps_clip = 0.1 cannot act" in done.stderr
