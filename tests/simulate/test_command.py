"""strop simulate, as a user types it."""

import json
import subprocess
import sys

import pytest
from commands.small_runs import ENVIRONMENT, strop
from examples.doc_pages import PAGES, blocks
from simulate.recorded import STEPS_OF_A_TEST, write_run

PLAN = """
num_steps = 3
prompts_per_step = 8
group_size = 4
mean_response_tokens = 40
num_engines = 4
num_trainers = 4
decode_step_s = 0.02
train_token_s = 0.002
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "plan.toml").write_text(PLAN)
    write_run(tmp_path / "run", STEPS_OF_A_TEST)
    return tmp_path


def row(out, name):
    """The cells of a row of the table."""
    (line,) = [line for line in out.splitlines() if f"│ {name} " in line]
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


def test_a_plan_prints_both_loops_the_splits_and_a_proposal(folder):
    done = strop("simulate", "plan.toml")
    assert (done.code, done.err) == (0, "")
    assert row(done.out, "engines x GPUs + training GPUs") == ["4 x 1 + 4", "4 x 1 + 4"]
    synchronous, asynchronous = map(float, row(done.out, "steps per hour"))
    assert asynchronous > synchronous > 0
    assert row(done.out, "staleness, mean and most")[0] == "0.00, 0"
    assert "\nProposal: " in done.out
    assert "that of strop train with rollout.max_off_policy_steps" in done.out
    assert done == strop("simulate", "plan.toml")


def test_flags_win_over_the_plan_and_the_plan_over_the_run(folder):
    assert (
        row(strop("simulate", "plan.toml", "--num-engines", "2").out, "engines x GPUs + training GPUs")[0]
        == "2 x 1 + 4"
    )
    of_run = strop("simulate", "--from-run", "run", "--split-gpus", "4")
    assert row(of_run.out, "engines x GPUs + training GPUs") == ["1 x 1 + 1, shared", "1 x 1 + 1"]
    both = strop("simulate", "one.toml", "--from-run", "run")
    assert both.code == 2
    (folder / "one.toml").write_text("num_engines = 3\n")
    both = strop("simulate", "one.toml", "--from-run", "run")
    assert row(both.out, "engines x GPUs + training GPUs")[0] == "3 x 1 + 1, shared"


def test_lengths_of_a_plan_win_over_those_of_the_run(folder):
    flags = (
        "--from-run",
        "run",
        "--max-off-policy-steps",
        "0",
        "--response-tokens-sigma",
        "0",
        "--decode-sequence-s",
        "0",
    )
    done = strop("simulate", *flags, "--mean-response-tokens", "50", "--decode-step-s", "1", "--max-sequences", "1000")
    assert float(row(done.out, "seconds per step")[0]) == pytest.approx(50, abs=1)


def test_what_a_run_gave_is_printed_as_a_plan(folder):
    done = strop("simulate", "--from-run", "run", "--max-off-policy-steps", "0")
    lines = done.out.partition("the plan")[0].splitlines()
    (folder / "again.toml").write_text("\n".join(lines))
    again = strop("simulate", "again.toml")
    assert again.code == 0, again.err
    assert any(line.startswith("decode_step_s = ") for line in lines)


def test_the_page_of_plots_needs_no_network(folder):
    done = strop("simulate", "plan.toml", "-o", "plan.html")
    assert done.out.endswith("plots: plan.html\n")
    page = (folder / "plan.html").read_text()
    assert page.count("<polyline") > 10
    assert [word for word in ("http", "src=", "<script") if word in page] == []


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "strop simulate needs a plan"),
        (["nowhere.toml"], "there is no such config file"),
        (["plan.toml", "--num-enginess", "3"], "The nearest option is num_engines"),
        (["plan.toml", "--transfer-s", "-1"], "transfer_s must be greater than or equal to 0"),
        (["plan.toml", "--train-token-s", "nan"], "train_token_s must be a finite number"),
        (["plan.toml", "--num-engines"], "--num-engines needs a value"),
        (["plan.toml", "--decode-step-s", "0", "--decode-sequence-s", "0"], "sampling would take no time"),
        (["plan.toml", "--updates-per-batch", "4"], "max_off_policy_steps must be 0 or at least updates_per_batch = 4"),
        (["plan.toml", "--engine-restart-s", "9"], "engine_restart_s = 9.0 is only used with engine_mtbf_h"),
        (["plan.toml", "--engine-mtbf-h", "1e-7"], "engine_mtbf_h must leave time to work between two failures"),
        (
            ["plan.toml", "--num-steps", "1000000", "--group-size", "100"],
            "num_steps times prompts_per_step times group_size",
        ),
        (["run/config.toml"], "run/config.toml is a config of a run"),
        (["--from-run", "nowhere"], "--from-run must be the folder of a run of strop train, got 'nowhere'"),
        (["--from-run", "empty"], "--from-run must have steps with times in metrics.jsonl"),
        (["--from-run", "broken"], "step_000003.jsonl: the lines must be rollouts"),
        (["--from-run", "ahead"], "--from-run must be a run whose sampling and training take turns, got 'ahead'"),
        (["plan.toml", "-o", "nowhere/plan.html"], "--output must be a file in a folder that is there"),
    ],
)
def test_bad_input_is_one_message(folder, words, message):
    write_run(folder / "empty", [])
    write_run(folder / "broken", STEPS_OF_A_TEST)
    config = write_run(folder / "ahead", STEPS_OF_A_TEST) / "config.toml"
    config.write_text(config.read_text().replace("[rollout]", "[rollout]\nmax_off_policy_steps = 1"))
    (folder / "broken/rollouts/step_000003.jsonl").write_text('{"prompt_row": 1}\n')
    done = strop("simulate", *words)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name == "planning.md"], ids=lambda page: page.parent.name
)
def test_the_page_of_planning_shows_what_is_printed(page, folder):
    (plan,) = [block for block in blocks(page) if block.language == "toml"]
    (shown,) = [block for block in blocks(page) if block.language == "text"]
    (folder / plan.file).write_text(plan.code)
    printed = strop("simulate", plan.file).out.splitlines()
    assert [line for line in shown.code.splitlines() if line not in printed] == []


def test_help_explains_every_option_with_its_unit():
    out = strop("simulate", "--help").out
    assert "--decode-step-s" in out
    assert "Mean hours between two failures of one engine." in " ".join(out.split())


def test_it_runs_without_torch(folder):
    program = """
import json, sys
from strop.cli import main
try:
    main()
except SystemExit:
    pass
print(json.dumps(sorted({"torch", "transformers"} & set(sys.modules))))
"""
    words = [sys.executable, "-c", program, "simulate", "plan.toml", "--from-run", "run"]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, cwd=folder)
    assert json.loads(done.stdout.splitlines()[-1]) == []
    assert "Proposal" in done.stdout
