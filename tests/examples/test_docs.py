"""What the documentation tells its reader to write and to type is accepted: by the real parser of the command line, the
real loader of configs, and Python. Training is left to test_getting_started.py, which follows that page for real."""

import ast
import re
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import tomlkit
from commands.small_runs import small_once, strop, strop_process
from examples.doc_pages import (
    PAGES,
    ROOT,
    Block,
    blocks,
    blocks_of,
    code_lines,
    commands,
    name_of,
    prose,
    spans,
    starting_page,
)
from rewards.written_rollouts import make_rollout

from strop.algorithms import objective_formula
from strop.cli import cli
from strop.compat.import_slime import KNOWN
from strop.config import load_config, to_toml
from strop.config.eval_target import load_eval_config
from strop.config.load import ROOTS
from strop.config.overrides import nest, parse_flags
from strop.config.sampling import FunctionRewardOptions
from strop.config.simulation import SimulationConfig, load_simulation
from strop.observe.console import _COLUMNS
from strop.rewards import make_scorer
from strop.rollout import Filters
from strop.types import Group, Prompt, Rollout

# What cannot be tried as it stands, and why.
NOT_TRIED = {
    "strop explain CONFIG": "CONFIG stands for any config",
    "algorithm.policy_loss.kind spo": "the loss that the page adds; test_added_objective.py adds it",
}
NOT_IN_THE_REPOSITORY = {
    "strop/ops/policy_loss/spo.py": "the reader writes it",
    "tests/ops/test_spo.py": "the reader writes it",
}
OLD_COMMAND = re.compile(r"^\$ strop (.*)\n((?:.*\n)*)", re.MULTILINE)

page_parameter = pytest.mark.parametrize("page", PAGES, ids=name_of)


def each(language):
    return pytest.mark.parametrize("block", blocks_of(language), ids=lambda block: block.where)


# ---- configs --------------------------------------------------------------------------------------------------------


def is_plan(values):
    """Of strop simulate."""
    return "num_engines" in values


def is_whole(values):
    return {"model", "data"} <= values.keys() or is_plan(values)


def laid_over(base, fragment):
    """A config with a page's fragment in place of its tables of the same name, as a reader would write it in."""
    merged = dict(base)
    for name, value in fragment.items():
        below = merged.get(name)
        same_kind = isinstance(value, dict) and isinstance(below, dict) and value.get("kind") == below.get("kind")
        keeps = isinstance(value, dict) and isinstance(below, dict) and ("kind" not in value or same_kind)
        merged[name] = laid_over(below, value) if keeps else value
    return merged


def base_config(page):
    """run.toml of getting started."""
    (whole,) = [block for block in blocks(starting_page(page)) if block.file == "run.toml"]
    return tomllib.loads(whole.code)


def command_of(block):
    """The command that the page runs a config with."""
    words = [command.words for command in commands(block.page)]
    return next((w[0] for w in words if w[1:2] == (block.file,) and w[0] in ROOTS), "train")


@each("toml")
def test_a_config_or_a_part_of_one_loads(block, tmp_path):
    values = tomllib.loads(block.code)
    if is_whole(values):
        assert block.file is not None, f"{block.where}: the line above a whole config names its file"
    else:
        values = laid_over(base_config(block.page), values)
    file = tmp_path / (block.file or "run.toml")
    file.write_text(tomlkit.dumps(values))
    if is_plan(values):
        assert load_simulation(file, {}).num_engines == values["num_engines"]
        return
    command = command_of(block)
    config = load_config(file, command=command)
    assert command == "sft" or objective_formula(config)


# ---- commands -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to start commands in, with the examples of the repository in it."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def write_block(block):
    """Write a config of a page under its name; a fragment goes into run.toml, a whole config stands as it is."""
    if block.language == "toml":
        values = tomllib.loads(block.code)
        values = values if is_whole(values) else laid_over(base_config(block.page), values)
        Path(block.file or "run.toml").write_text(tomlkit.dumps(values))


def accept(words, finished_runs):
    """What a command does with its line before it loads a model."""
    name, *rest = words
    if rest == ["--help"]:
        assert name in cli.commands
        return
    given = cli.commands[name].make_context(name, rest).params
    if name in ("doctor", "help", "schema", "import-slime"):
        return
    if name == "eval":
        accept_eval(given["target"], given["flags"])
        return
    if name == "simulate":  # a run that it names is one of the reader's
        paths = [Path(word) for word in given["words"][:1] if not word.startswith("--")]
        flags = parse_flags(SimulationConfig, given["words"][len(paths) :])
        load_simulation(paths[0] if paths else None, flags)
        return
    path = given["run"] if name == "replay" else given["config"]
    if name == "replay" and not path.exists():  # the run of getting started, whose config is that of the page
        path = Path("run.toml")
    is_sft = name == "sft" or given.get("is_sft", False)
    command = "sft" if is_sft else "train"
    flags = parse_flags(ROOTS[command], given["flags"])
    config = load_config(path / "config.toml" if path.is_dir() else path, flags, command=command)
    if name in ("train", "sft"):
        assert given.get("resume") or config.run.overwrite or config.folder not in finished_runs, "holds a run already"
        finished_runs.add(config.folder)
        config.folder.mkdir(parents=True, exist_ok=True)
        (config.folder / "config.toml").write_text(to_toml(config))


def accept_eval(target, flags):
    """A folder that an earlier command or the reader left is made here; of a model's, what tells it from others."""
    if target.suffix != ".toml" and not target.exists():
        target.mkdir(parents=True)
        (target / "config.json").touch()
    config = load_eval_config(target, parse_flags(ROOTS["eval"], flags, is_eval=True))
    assert config.eval.all_sets, "eval.data must be given"


@page_parameter
def test_every_command_is_accepted_in_the_order_of_the_page(page, folder):
    """A fragment is in run.toml for the commands after it. `runs/run` of getting started is there on the pages after it."""
    before = blocks(starting_page(page)) if page != starting_page(page) else []
    for block in before:
        write_block(block)
    finished_runs, refused = set(), []
    for item in sorted([*blocks(page), *commands(page)], key=lambda item: item.offset):
        if isinstance(item, Block):
            write_block(item)
        elif not any(text in item.where for text in NOT_TRIED):
            try:
                accept(item.words, finished_runs)
            except Exception as error:  # noqa: BLE001  all that the reader of the page would meet, together
                refused.append(f"{item.where}: {error}")
    assert refused == []


@pytest.mark.parametrize("block", [b for b in blocks_of("text") if "$ strop " in b.code], ids=lambda block: block.where)
def test_a_command_that_is_shown_with_its_output_prints_that(block, folder):
    line, shown = OLD_COMMAND.match(block.code).groups()
    done = strop(*line.split())
    assert done.out + done.err == shown


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name == "presets.md"], ids=lambda page: page.parent.parent.name
)
def test_the_origins_that_the_page_of_presets_shows_are_those_of_its_command(page, folder):
    (command,) = [command for command in commands(page) if command.words[0] == "explain"]
    *_, fragment = [b for b in blocks(page) if b.language == "toml" and b.offset < command.offset]
    write_block(fragment)
    printed = [" ".join(line.split()) for line in strop(*command.words).out.splitlines()]
    (table,) = [b for b in blocks(page) if b.language == "text" and b.code.startswith("option ")]
    shown = [" ".join(line.split()) for line in table.code.splitlines()]
    assert [line for line in shown if line not in printed] == []


# ---- Python ---------------------------------------------------------------------------------------------------------


def calls_of_load_config(code):
    return [
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call) and "load_config" in ast.dump(node.func)
    ]


def literal(node):
    """A constant, or for anything that is only known while training its text."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


@pytest.mark.parametrize(
    "block", [b for b in blocks_of("python") if "load_config(" in b.code], ids=lambda block: block.where
)
def test_the_overrides_of_load_config_are_accepted(block, folder):
    for part in blocks(block.page):
        if part.offset < block.offset and part.file:
            write_block(part)
    for call in calls_of_load_config(block.code):
        path, overrides = call.args
        pairs = zip(overrides.keys, overrides.values, strict=True)
        more = {word.arg: literal(word.value) for word in call.keywords}
        config = load_config(ast.literal_eval(path), {literal(key): literal(value) for key, value in pairs}, **more)
        assert "strop.evaluate" not in block.code or config.eval.data is not None


@pytest.mark.parametrize(
    "block",
    [b for b in blocks_of("python") if "Rollout" in b.code and "-> bool" not in b.code],
    ids=lambda block: block.where,
)
def test_a_reward_function_scores(block, folder):
    file = block.file or "my_reward.py"
    Path(file).write_text(block.code)
    (name,) = re.findall(r"^(?:async )?def (\w+)", block.code, re.MULTILINE)
    scorer = make_scorer(FunctionRewardOptions(function=f"{file}:{name}", batched="list[Rollout]" in block.code))
    right, wrong = scorer([make_rollout("56", "56"), make_rollout("57", "56")]).rollouts
    assert right.reward > wrong.reward


@pytest.mark.parametrize("page", [p for p in PAGES if p.name == "filters-and-curriculum.md"], ids=name_of)
def test_the_filters_of_the_page_keep_and_drop(page, folder):
    (functions,) = [block for block in blocks(page) if block.language == "python"]
    (table,) = [block for block in blocks(page) if functions.file in block.code and block.language == "toml"]
    Path(functions.file).write_text(functions.code)
    write_block(table)
    filters = Filters(load_config("run.toml").filter)
    one, other = (replace(make_rollout("56", "56"), sample=i, reward=float(i)) for i in (0, 1))
    found = filters([Group(0, one.prompt, (one, other)), Group(1, one.prompt, (one, one))])
    assert [group.group_id for group in found.groups] == [0]


@pytest.mark.parametrize("page", [p for p in PAGES if p.name == "from-slime.md"], ids=name_of)
def test_a_reward_function_of_slime_scores(page, folder):
    (function,) = [block for block in blocks(page) if "async def" in block.code]
    (table,) = [block for block in blocks(page) if block.language == "toml"]
    Path(function.file).write_text(function.code)
    write_block(table)
    scorer = make_scorer(load_config("run.toml").reward)
    assert [rollout.reward for rollout in scorer([make_rollout("56", "56"), make_rollout("57", "56")]).rollouts] == [
        2,
        0,
    ]


@pytest.mark.parametrize(
    "block",
    [
        b
        for b in blocks_of("python")
        if "import" in b.code and not re.search(r"strop.train|strop.sft|evaluate|Rollout|\bspo\b|async def", b.code)
    ],
    ids=lambda block: block.where,
)
def test_any_other_program_runs(block, folder):
    exec(compile(block.code, block.where, "exec"), {})


# ---- names ----------------------------------------------------------------------------------------------------------


@page_parameter
def test_every_target_of_make_that_is_named_exists(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [re.match(r"make ([a-z][\w-]*)", line) for _, line in code_lines(page)]
    assert [match[0] for match in named if match and match[1] not in targets] == []


def is_of_a_rollout(path):
    """rollout.text and the like: what a reward function reads."""
    parts = path.split(".")
    kind, name = (Prompt, parts[2]) if parts[:2] == ["rollout", "prompt"] and len(parts) > 2 else (Rollout, parts[1])
    return parts[0] == "rollout" and hasattr(kind, name)


@page_parameter
def test_every_option_that_the_prose_names_exists(page):
    """`--lr 2e-6`, `trainer.lr`, `algorithm.kl.coef = 0`: a flag, or a path that begins with a table of the config."""
    flags = [re.match(r"--([\w.-]+)", text) for _, text in spans(page)]
    of_commands = {o.name for command in cli.commands.values() for o in command.params}
    of_commands |= {long.lstrip("-") for command in cli.commands.values() for o in command.params for long in o.opts}
    named = [match[1].replace("-", "_") for match in flags if match and match[1] not in of_commands]
    if page.name == "from-slime.md":
        named = [name for name in named if f"--{name.replace('_', '-')}" not in KNOWN]
    tables = {table for root in ROOTS.values() for table in root.model_fields}
    dotted = [re.match(r"([a-z_]+)\.[a-z_.]+(?![\w/(])", text) for _, text in spans(page)]
    paths = [match[0] for match in dotted if match and match[1] in tables]
    named += [path for path in paths if not is_of_a_rollout(path) and not path.endswith((".py", ".toml"))]
    ways = [(root, is_eval) for root in (*ROOTS.values(), SimulationConfig) for is_eval in (False, True)]
    wrong = [name for name in named if all(nest(root, {name: "1"}, is_eval=is_eval)[1] for root, is_eval in ways)]
    assert wrong == []


@page_parameter
def test_every_path_of_the_repository_that_is_named_exists(page):
    shown = [text for _, text in code_lines(page)]
    named = {
        path for text in shown for path in re.findall(r"(?:strop|tests|examples|docs|tools|benchmarks)/[\w./-]*", text)
    }
    assert [path for path in sorted(named) if not (ROOT / path).exists() and path not in NOT_IN_THE_REPOSITORY] == []


def tree_of(page):
    """The folder tree of a README: name to the words beside it, names of a folder's contents below that of the folder."""
    (tree,) = [block.code for block in blocks(page) if block.code.startswith("strop/\n")]
    found, above = {}, ""
    for line in tree.splitlines():
        name, _, words = line.strip().partition(" ")
        above = "" if not line.startswith(" ") else above or "strop/"
        found[above + name] = words.strip()
    return found


def contents(folder):
    """What a folder of the repository holds, folders with a slash, without what tools leave there."""
    left = {"runs/", "dist/", "build/", "site/"}
    paths = [path for path in folder.iterdir() if path.name[0] not in "._" and path.suffix != ".egg-info"]
    return {f"{path.name}/" if path.is_dir() else path.name for path in paths} - left


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "README.zh.md"], ids=name_of)
def test_the_folder_tree_is_that_of_the_repository(page):
    tree = tree_of(page)
    folders = {name for name in contents(ROOT) if name.endswith("/")}
    assert set(tree) == folders | {f"strop/{name}" for name in contents(ROOT / "strop")}
    for folder in ("examples/", "docs/"):
        inside = {name.strip("/") for name in contents(ROOT / folder) if name.endswith("/")}
        assert set(re.split("[,、] ?", tree[folder])) == inside
    assert set(re.findall(r"[\w-]+", tree["strop/cli/"])) == {"strop", *cli.commands}


# ---- while it runs --------------------------------------------------------------------------------------------------

RUNNING = [page for page in PAGES if page.name == "while-it-runs.md"]
language_parameter = pytest.mark.parametrize("page", RUNNING, ids=lambda page: page.parent.name)


@language_parameter
def test_the_columns_of_a_step_s_line_are_explained(page):
    rows = dict(re.findall(r"^\| `([\w/]+)` \| `([\w/]+)` \|", prose(page), re.MULTILINE))
    assert rows | {"nll": "nll"} == {label: metric for label, metric, _ in _COLUMNS}
    assert "`nll`" in prose(page)


# A way to meet each message of the page, except those of guards, which tests/trainers and tests/engines meet.
MESSAGES = {
    "is not an option": ["--run.folders", "x"],
    "is ambiguous": ["--kind", "jsonl"],
    "cannot act": ["--updates-per-batch", "1", "--eps-clip", "0.5"],
    "holds a run already": ["--run.folder", "taken"],
    "must divide rollout.prompts_per_step": ["--updates-per-batch", "3"],
    "it does not fit the model's": ["--rollout.max_response_tokens", "126"],
    "positions of the model at": ["--rollout.max_response_tokens", "5000"],
    "there is no such file": ["--data.path", "nowhere.jsonl"],
    "no model of that name could be had": ["--model.path", "nobody/nothing"],
    "must return a finite number": ["--run.folder", "fails", "--reward.function", "fails.py:score"],
    "there is no complete checkpoint": ["--resume"],
    "eval.data must be given": [],
}
MET_IN_OTHER_TESTS = {
    "is being written by a run",  # tests/commands/test_run_folder.py
    "as in the run that is resumed",  # tests/runtime/test_resume.py
    "did not end within reward.timeout_s",  # tests/rewards/test_workers.py, and the next three
    "ended its process",
    "lost its process to signal",
    "scoring waits for",
    "the engine has finished no prompt for",  # tests/rollout/test_in_time.py
    "in which the engine finished no prompt",  # tests/commands/test_waits.py
    "the checkpoint cannot be written",  # tests/runtime/test_crashes.py
}


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_what_strop_prints(message, small, folder):
    shutil.copy(small.train, "run.toml")
    Path("taken/model").mkdir(parents=True)
    Path("fails.py").write_text("def score(rollout):\n    raise KeyError\n")
    words = ["eval" if message == "eval.data must be given" else "train", "run.toml", *MESSAGES[message]]
    # A process of its own stays away from the hub.
    done = strop_process(*words, cwd=folder) if "--model.path" in words else strop(*words)
    assert done.code == 2
    assert message in done.err


@language_parameter
def test_the_page_lists_these_messages_and_no_others(page):
    *_, table = prose(page).split("\n## ")
    assert set(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)) == {*MESSAGES, *MET_IN_OTHER_TESTS}


def test_what_is_not_tried_is_still_on_a_page():
    shown = [text for page in PAGES for _, text in [*code_lines(page), *spans(page)]]
    assert [name for name in (*NOT_TRIED, *NOT_IN_THE_REPOSITORY) if not any(name in text for text in shown)] == []
