"""Evaluation through the commands: several sets, when it happens, the best step, and what it leaves alone."""

import json
import shutil
import signal

import pytest
from commands.small_runs import metrics, read_lines, same_weights, small_once, strop
from forked import Command


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


def a_set(small, name, num_prompts, **options):
    """Flags of a named set of held-out prompts."""
    given = {"data.kind": "jsonl", "data.path": f"{small.folder}/held_out.jsonl", "data.max_prompts": num_prompts}
    return tuple(word for path, value in (given | options).items() for word in (f"--eval.sets.{name}.{path}", value))


def two_sets(small):
    own = {"reward.kind": "exact", "greedy": "false", "num_samples": 4, "temperature": 0.5, "max_response_tokens": 3}
    return (*a_set(small, "letters", 8), *a_set(small, "exact-4", 5, **own))


FLAGS = (
    "--eval.every_steps",
    "1",
    "--eval.success_reward",
    "0.5",
    "--checkpoint-every-steps",
    "1",
    "--keep-checkpoints",
    "9",
)


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    """Three steps, each evaluated on two named sets; what the command printed, and the run folder."""
    folder = tmp_path_factory.mktemp("sets") / "run"
    done = strop("train", small.train, *two_sets(small), *FLAGS, "--run.folder", folder)
    assert done.code == 0, done.err
    return done, folder


# ---- several sets ---------------------------------------------------------------------------------------------------


def test_each_set_has_its_own_prompts_reward_sampling_and_length(whole, small):
    _, run = whole
    letters, exact = (read_lines(run / f"rollouts/eval_000002_{name}.jsonl") for name in ("letters", "exact-4"))
    assert [len({row["prompt_row"] for row in rows}) for rows in (letters, exact)] == [8, 5]
    assert (len(letters), len(exact)) == (8 + 8, 5 * 4)  # greedy and one sample; four samples
    assert {row["reward"] for row in exact} <= {0.0, 1.0}
    assert len({row["reward"] for row in letters}) > 2
    assert max(row["num_response_tokens"] for row in exact) == 3
    assert max(row["num_response_tokens"] for row in letters) == 6  # rollout.max_response_tokens


def test_the_metrics_of_a_set_carry_its_name_and_follow_from_its_answers(whole):
    _, run = whole
    for row in metrics(run):
        of_letters = read_lines(run / f"rollouts/eval_{row['step']:06d}_letters.jsonl")
        rewards = [r["reward"] for r in of_letters[8:]]
        assert row["eval/letters/greedy_reward"] == pytest.approx(sum(r["reward"] for r in of_letters[:8]) / 8)
        assert row["eval/letters/sampled_reward"] == pytest.approx(sum(rewards) / 8)
        assert row["eval/letters/pass@1"] == pytest.approx(sum(r >= 0.5 for r in rewards) / 8)
        assert row["eval/letters/sampled_reward_low"] <= row["eval/letters/sampled_reward"]
        lengths = [r["num_response_tokens"] for r in read_lines(run / f"rollouts/eval_{row['step']:06d}_exact-4.jsonl")]
        assert row["eval/exact-4/sampled_response_tokens"] == sum(lengths) / 20
        named = {name.removeprefix("eval/exact-4/") for name in row if name.startswith("eval/exact-4/")}
        assert {"pass@1", "pass@2", "pass@4", "maj@4", "sampled_reward", "sampled_truncated"} <= named
        assert not [name for name in named if name.startswith("greedy")]


def test_the_console_names_the_sets_and_the_best_step(whole):
    done, run = whole
    lines = [line for line in done.out.splitlines() if line.startswith("eval after step")]
    assert [line.split()[3] for line in lines] == ["0:", "1:", "2:", "3:"]
    assert "letters/greedy reward 0." in lines[0]
    assert "exact-4/sampled reward" in lines[0]
    assert "pass@4" in lines[0]
    values = [row["eval/letters/sampled_reward"] for row in metrics(run)]
    best = values.index(max(values))
    said = f"best step: {best} of 3 with eval/letters/sampled_reward = {max(values):.4g}, kept in {run}/best"
    assert said in done.out


def test_the_report_has_a_curve_for_each_score_of_each_set(whole):
    page = (whole[1] / "report.html").read_text()
    assert all(f"<b>eval/{name}</b>" in page for name in ("letters/sampled_reward", "letters/pass@1", "exact-4/maj@4"))


# ---- when -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, steps",
    [
        ((), [0, 3]),
        (("--eval.at_start", "false"), [3]),
        (("--eval.at_start", "false", "--eval.every_steps", "2"), [2, 3]),
    ],
)
def test_evaluations_are_made_at_the_start_every_so_often_and_at_the_end(small, tmp_path, flags, steps):
    done = strop("train", small.train, *small.eval_flags, *flags, "--run.folder", tmp_path / "run")
    assert done.code == 0, done.err
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows if "eval/greedy_reward" in row] == steps
    assert [row["step"] for row in rows] == [0, 1, 2, 3][steps[0] != 0 :]


def test_the_evaluation_at_the_start_is_made_once_however_often_the_run_stops_before_its_first_step(small, tmp_path):
    flags = (*small.eval_flags, "--checkpoint-every-steps", "1", "--run.folder", tmp_path / "run")
    (tmp_path / "held.py").write_text(
        "import time\nfrom pathlib import Path\n\ndef score(rollout):\n"
        f"    while rollout.sample == 9 and not Path({str(tmp_path / 'go')!r}).exists():\n        time.sleep(0.01)\n"
        "    return rollout.sample % 3\n"
    )
    flags = (*flags, "--reward.function", f"{tmp_path}/held.py:score", "--num-steps", "1", "--group-size", "10")
    with Command(tmp_path, "train", small.train, *flags) as going:
        going.until("eval after step 0")
        going.send_signal(signal.SIGINT)
        assert going.wait() == 130, going.err
    (tmp_path / "go").touch()
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0]
    assert (tmp_path / "run/checkpoints/step_000000").exists()
    done = strop("train", small.train, *flags, "--resume")
    assert done.code == 0, done.err
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1]
    assert "eval after step 0" not in done.out
    assert "best step: " in done.out


# ---- what it leaves alone -------------------------------------------------------------------------------------------


def test_training_makes_the_same_steps_with_evaluations_and_without(small, whole, tmp_path):
    _, with_sets = whole
    done = strop("train", small.train, "--run.folder", tmp_path / "run")
    assert done.code == 0, done.err
    assert same_weights(tmp_path / "run/model", with_sets / "model")
    plain = metrics(tmp_path / "run")
    assert plain == [
        {name: row[name] for name in row if not name.startswith("eval/")} for row in metrics(with_sets)[1:]
    ]
    for step in (1, 2, 3):
        file = f"rollouts/step_{step:06d}.jsonl"
        assert (tmp_path / "run" / file).read_bytes() == (with_sets / file).read_bytes()


def test_the_same_weights_give_the_same_evaluation_at_every_call(whole):
    """During the run after the last step, and twice by strop eval; the engine has sampled other things in between."""
    _, run = whole
    one, other = (strop("eval", run, "--json") for _ in range(2))
    assert one.code == 0, one.err
    assert one == other
    last = metrics(run)[-1]
    for name, score in json.loads(one.out).items():
        assert score["reward"] == last[f"eval/{name}_reward"]
        assert {f"pass@{k}": e["value"] for k, e in score["pass_at"].items()} == {
            key.rpartition("/")[2]: value
            for key, value in last.items()
            if key.startswith(f"eval/{name.partition('/')[0]}/pass@") and name.endswith("sampled")
        }


# ---- the best step --------------------------------------------------------------------------------------------------


def best_of(run):
    return json.loads((run / "best/best.json").read_text())


@pytest.fixture(scope="module")
def worsening(small, tmp_path_factory):
    """A run whose best step is not its last: the metric that decides counts the answers that are cut off by none."""
    folder = tmp_path_factory.mktemp("worsening")
    (folder / "held_out.py").write_text("def score(rollout):\n    return rollout.num_response_tokens % 5 / 5\n")
    rest = {"reward.kind": "function", "reward.function": f"{folder}/held_out.py:score"}
    flags = (*a_set(small, "first", 4), *a_set(small, "short", 8, **rest), "--eval.best", "eval/short/greedy_reward")
    flags = (*flags, "--num-steps", "6", *FLAGS)
    done = strop("train", small.train, *flags, "--run.folder", folder / "run")
    assert done.code == 0, done.err
    return done, folder / "run", flags


def test_the_best_step_is_that_with_the_highest_value_of_the_metric_that_decides(worsening):
    done, run, _ = worsening
    values = {row["step"]: row["eval/short/greedy_reward"] for row in metrics(run)}
    step = max(values, key=lambda step: (values[step], -step))
    assert step not in (0, 6), values  # else this test shows little: give the run another seed
    assert best_of(run) == {"step": step, "metric": "eval/short/greedy_reward", "value": values[step]}
    assert f"best step: {step} of 6 with eval/short/greedy_reward" in done.out


def test_of_steps_that_are_equally_good_the_earliest_is_the_best(small, tmp_path):
    flags = (*small.eval_flags, "--reward.function", small.reward("equal"), "--num-steps", "1")
    assert strop("train", small.train, *flags, "--run.folder", tmp_path / "run").code == 0
    assert best_of(tmp_path / "run")["step"] == 0


def test_an_evaluation_without_a_scored_answer_is_not_compared_and_the_run_goes_on(small, tmp_path):
    """Such as one whose scorer was away, with reward.on_error = exclude."""
    (tmp_path / "away.py").write_text("def score(rollout):\n    return None\n")
    away = a_set(small, "away", 2, **{"reward.kind": "function", "reward.function": f"{tmp_path}/away.py:score"})
    flags = (*away, "--eval.sets.away.reward.num_workers", "0", "--num-steps", "1")
    done = strop("train", small.train, *flags, "--run.folder", tmp_path / "run")
    assert done.code == 0, done.err
    assert "eval/away/sampled_reward cannot be measured after step 1" in done.out
    assert "best step" not in done.out
    assert metrics(tmp_path / "run")[1]["eval/away/sampled_num_excluded"] == 2


def test_the_model_that_is_kept_is_that_of_the_best_step(worsening):
    _, run, _ = worsening
    step = best_of(run)["step"]
    scores = json.loads(strop("eval", run / "best", "--json").out)
    row = next(row for row in metrics(run) if row["step"] == step)
    assert scores["short/greedy"]["reward"] == row["eval/short/greedy_reward"]
    assert scores["first/sampled"]["reward"] == row["eval/first/sampled_reward"]
    from safetensors.torch import load_file

    weights = load_file(run / f"checkpoints/step_{step:06d}/weights.safetensors")
    kept = load_file(run / "best/model.safetensors")
    assert [name for name in kept if not kept[name].equal(weights[name])] == []


def test_the_best_step_survives_a_stop_and_a_resumed_run_equals_one_that_never_stopped(small, worsening, tmp_path):
    """Stopped after the best step: a run that forgot it would take a worse one."""
    _, run, flags = worsening
    step = best_of(run)["step"]
    stopped = tmp_path / "run"
    shutil.copytree(run, stopped)
    for later in range(step + 1, 7):
        shutil.rmtree(stopped / f"checkpoints/step_{later:06d}")
    done = strop("train", small.train, *flags, "--run.folder", stopped, "--resume")
    assert done.code == 0, done.err
    assert best_of(stopped) == best_of(run)
    assert same_weights(stopped / "best", run / "best")
    assert f"best step: {step} of 6" in done.out
    assert metrics(stopped) == metrics(run)
    assert (stopped / "checkpoints/step_000006/run.json").read_bytes() == (
        run / "checkpoints/step_000006/run.json"
    ).read_bytes()


def test_another_metric_on_resuming_starts_the_search_anew_and_says_so(small, worsening, tmp_path):
    _, run, flags = worsening
    stopped = tmp_path / "run"
    shutil.copytree(run, stopped)
    shutil.rmtree(stopped / "checkpoints/step_000006")
    flags = tuple("eval/first/pass@1" if word == "eval/short/greedy_reward" else word for word in flags)
    done = strop("train", small.train, *flags, "--run.folder", stopped, "--resume")
    assert done.code == 0, done.err
    assert "eval.best is eval/first/pass@1 and was eval/short/greedy_reward" in done.out
    assert best_of(stopped)["step"] == 6


def test_without_keep_best_no_model_is_written_and_the_best_step_is_still_said(small, tmp_path):
    run = tmp_path / "run"
    done = strop("train", small.train, *small.eval_flags, "--eval.keep_best", "false", "--run.folder", run)
    assert done.code == 0, done.err
    assert not (run / "best").exists()
    assert "best step: " in done.out
    assert "kept in" not in done.out
    refused = strop("eval", run / "best")
    assert refused.code == 2
    assert "keeps no best model of its run: no evaluation of it is made yet, or eval.keep_best = false" in refused.err


def test_the_best_model_of_an_earlier_run_does_not_pass_for_that_of_the_new_one(small, tmp_path):
    run = tmp_path / "run"
    assert strop("train", small.train, *small.eval_flags, "--num-steps", "1", "--run.folder", run).code == 0
    assert (run / "best/best.json").exists()
    assert strop("train", small.train, "--num-steps", "1", "--run.folder", run, "--run.overwrite").code == 0
    assert not (run / "best").exists()


# ---- strop eval -----------------------------------------------------------------------------------------------------


def scores_of(*arguments):
    done = strop("eval", *arguments, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_eval_takes_a_model_folder_by_itself(small):
    """The same numbers as with a config that names that model."""
    length = ("--rollout.max_response_tokens", "6")
    held_out = ("--data.path", small.folder / "held_out.jsonl", "--data.max_prompts", "8")
    alone = scores_of(small.start, *held_out, "--reward.kind", "exact", *length, "--num-samples", "3")
    assert alone == scores_of(small.exact, *small.eval_flags, "--num-samples", "3")
    assert list(alone) == ["greedy", "sampled"]
    assert list(alone["sampled"]["pass_at"]) == ["1", "2", "3"]


def test_eval_takes_named_sets_for_a_model_folder_each_with_its_reward(small):
    flags = a_set(small, "a", 4, **{"reward.kind": "exact", "max_response_tokens": 4})
    assert list(scores_of(small.start, *flags)) == ["a/greedy", "a/sampled"]


def test_eval_takes_the_model_folder_of_sft(small, tmp_path):
    assert strop("sft", small.sft, "--num-steps", "1", "--run.folder", tmp_path / "run").code == 0
    held_out = (
        "--data.path",
        small.folder / "held_out.jsonl",
        "--rollout.max_response_tokens",
        "6",
        "--max-prompts",
        "4",
    )
    assert scores_of(tmp_path / "run/model", *held_out, "--reward.kind", "exact")["greedy"]["num_prompts"] == 4


def test_eval_guesses_the_kind_of_a_data_file_by_its_name(small, tmp_path):
    import pyarrow
    from pyarrow import parquet

    rows = read_lines(small.folder / "held_out.jsonl")[:4]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "held_out.parquet")
    flags = ("--reward.kind", "exact", "--rollout.max_response_tokens", "6")
    one = scores_of(small.start, "--data.path", tmp_path / "held_out.parquet", *flags)
    assert one == scores_of(small.start, "--data.path", small.folder / "held_out.jsonl", *flags, "--max-prompts", "4")


@pytest.mark.parametrize(
    "flags, message",
    [
        ((), "eval.data must be given: {start} is a model without a config."),
        (("--data.path", "x"), "reward.kind must be given to score the answers."),
        (("--data.path", "x", "--eval.data.path", "y"), "data.* means eval.data.* where a model is evaluated"),
        (("--data.path", "x", "--reward.kind", "exact", "--lr", "1"), "trainer.lr = 1.0 cannot act in strop eval"),
        (
            ("--data.path", "x", "--reward.kind", "exact", "--eval.best", "eval/pass@1"),
            "eval.best = eval/pass@1 cannot act",
        ),
        (("--data.chat", "never", "--reward.kind", "exact"), "eval.data.kind must be given. It may be jsonl, parquet"),
    ],
)
def test_what_a_model_folder_by_itself_lacks_is_said_before_it_is_loaded(small, flags, message):
    done = strop("eval", small.start, *flags)
    assert (done.code, done.out) == (2, "")
    assert message.format(start=small.start) in done.err


def test_a_folder_that_holds_neither_run_nor_model_is_refused(small):
    done = strop("eval", small.folder)
    assert done.code == 2
    assert "a run folder has a config.toml, a model's folder a config.json" in done.err


def test_the_table_shows_every_score_with_its_interval_and_the_first_answers_of_each_set(small, whole, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    _, run = whole
    done = strop("eval", run, "--show", "1")
    assert done.code == 0, done.err
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.out.splitlines() if "│" in line]
    table = [row for row in rows if len(row) == 7]
    assert [row[:2] for row in table] == [
        ["letters", "greedy reward"],
        ["", "sampled reward"],
        ["", "pass@1"],
        ["exact-4", "sampled reward"],
        *(["", name] for name in ("pass@1", "pass@2", "pass@4", "maj@4")),
    ]
    last = metrics(run)[-1]
    low, high = (last[f"eval/exact-4/sampled_reward_{end}"] for end in ("low", "high"))
    assert table[3][2:5] == [f"{last['eval/exact-4/sampled_reward']:.3f}", f"{low:.3f} - {high:.3f}", "5"]
    assert "Wilson" in done.out
    answers = [row for row in rows if len(row) == 4]
    assert len(answers) == 2


def test_a_prompt_too_long_for_a_set_names_the_option_of_that_set(small):
    flags = a_set(small, "long", 4, max_response_tokens=400)
    done = strop("eval", small.train, *flags)
    assert done.code == 2
    assert "eval.sets.long.max_response_tokens must be below the 128 positions of the model" in done.err


def test_a_broken_file_of_a_set_names_its_table_before_the_first_step(small, tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "a="}\n{\n')
    flags = a_set(small, "broken", 4, **{"data.path": path})
    done = strop("train", small.train, *flags, "--run.folder", tmp_path / "run")
    assert done.code == 2
    assert "broken.jsonl" in done.err
    assert not (tmp_path / "run").exists()
