"""Each kind of bad input: one clear message on stderr, exit code 2, no traceback, nothing written."""

import json
import logging
import shutil

import pytest
from commands.small_runs import read_lines, refusing, small_once, strop


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.fixture
def refused(tmp_path):
    return refusing(tmp_path)


# ---- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--rollout.group_sise", "4"], ["rollout.group_sise is not an option", "rollout.group_size"]),
        (["--grup-size", "4"], ["grup_size is not an option", "rollout.group_size"]),
        (["--data.max-response-tokens", "4"], ["rollout.max_response_tokens"]),
        (["--rollout.group_size", "many"], ["rollout.group_size must be", "a whole number", "many"]),
        (["--rollout.group_size", "-3"], ["rollout.group_size must be greater than or equal to 1", "-3"]),
        (["--rollout.group_size", "1"], ["rollout.group_size must be 2 or more", "got 1"]),
        (["--algorithm.reduction", "mean"], ["algorithm.reduction must be one of", "token_mean", "mean"]),
        (["--reward.kind", "dataset"], ["reward.kind must not be dataset with data.kind = jsonl"]),
        (["--seed"], ["--seed needs a value"]),
        (["--seed", "1", "--seed", "2"], ["--seed is given twice"]),
        (["more.toml"], ["more.toml", "expected an option"]),
        (
            ["--algorithm.preset", "cispo", "--eps-clip-c", "3"],
            ["algorithm.policy_loss.eps_clip_c is not an option here", 'belongs to kind = "ppo_clip"'],
        ),
        (["--eps-clip-c", "1.1"], ["eps_clip_c must be above 1 + eps_clip_high = 1.2", "got 1.1"]),
        (
            ["--eps-clip-c", "3", "--updates-per-batch", "1"],
            ["algorithm.policy_loss.eps_clip_c = 3", "every ratio is exactly 1"],
        ),
        (["--algorithm.kl.kind", "k2"], ["algorithm.kl.kind = k2", "algorithm.kl.coef is above 0"]),
    ],
)
def test_a_wrong_option_is_refused_and_the_message_says_what_would_be_right(small, refused, flags, says):
    config = small.exact if "dataset" in flags else small.train  # the options of a function fit no other kind of reward
    message = refused("train", config, *flags)
    assert [part for part in says if part not in message] == [], message


def test_all_wrong_options_are_named_at_once(small, tmp_path):
    done = strop("train", small.train, "--rollout.group_size", "1", "--updates-per-batch", "3", "--lr", "-1")
    assert done.code == 2
    assert "trainer.lr" in done.err
    done = strop("train", small.train, "--rollout.group_size", "1", "--updates-per-batch", "3")
    assert done.code == 2
    first, *problems = done.err.splitlines()
    assert first == "error: 2 problems"
    assert ["rollout.group_size" in "".join(problems), "algorithm.updates_per_batch" in "".join(problems)] == [True] * 2


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["train", "sft", "eval", "explain"])
def test_a_missing_config_file_is_named(command, tmp_path):
    done = strop(command, tmp_path / "nothing.toml")
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: {tmp_path}/nothing.toml: there is no such config file.\n"


def test_broken_toml_is_named_by_file_and_line(refused, tmp_path):
    config = tmp_path / "broken.toml"
    config.write_text('[model]\npath = "x"\n[data\nkind = "jsonl"\n')
    message = refused("train", config)
    assert str(config) in message
    assert "line 3" in message


def test_a_folder_in_place_of_a_config_file_is_named(refused, tmp_path):
    (tmp_path / "folder").mkdir()
    assert str(tmp_path / "folder") in refused("train", tmp_path / "folder")


def test_a_config_that_is_not_text_is_named(refused, tmp_path):
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "binary.toml" in refused("train", tmp_path / "binary.toml")


# ---- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_missing_model_folder_is_named(small, refused, command, tmp_path):
    message = refused(command, getattr(small, command), "--model.path", tmp_path / "nothing")
    assert f"model.path must be a Hugging Face folder or name, got '{tmp_path}/nothing'" in message


@pytest.mark.parametrize("path", ["runs/nothing", "./nothing", "../nothing/model", "runs/a/b"])
def test_a_missing_model_folder_given_relative_is_named_as_such(small, refused, path, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "there is no such folder" in refused("train", small.train, "--model.path", path)


@pytest.mark.parametrize("command", ["train", "sft"])
def test_truncated_weights_are_named(small, refused, command, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(small.start, model)
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    message = refused(command, getattr(small, command), "--model.path", model)
    assert f"model.path = '{model}' cannot be loaded" in message


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_model_folder_without_one_of_its_files_is_named(small, refused, missing, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(small.start, model)
    (model / missing).unlink()
    message = refused("train", small.train, "--model.path", model)
    assert "model.path" in message
    assert str(model) in message


@pytest.mark.parametrize("name", ["cuda:7", "gpu"])
def test_a_device_that_is_not_there_is_named(small, refused, name):
    assert f"model.device must be a device of this machine, got '{name}'" in refused(
        "train", small.train, "--model.device", name
    )


# ---- run folders ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_run_folder_below_a_file_is_refused(small, command, tmp_path):
    (tmp_path / "file").write_text("mine")
    done = strop(command, getattr(small, command), "--run.folder", tmp_path / "file" / "run")
    assert done.code == 2
    assert f"run.folder must be a folder that can be written, got '{tmp_path}/file/run'" in done.err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_folder_that_holds_a_run_is_refused_and_left_as_it_is(small, command, tmp_path):
    config, run = getattr(small, command), tmp_path / "run"
    assert strop(command, config, "--num-steps", "1", "--run.folder", run).code == 0
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = strop(command, config, "--seed", "1", "--run.folder", run)
    assert done.code == 2
    assert [word for word in ("holds a run already", "--run.overwrite") if word not in done.err] == []
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert strop(command, config, "--num-steps", "2", "--run.folder", run, "--run.overwrite").code == 0
    assert [row["step"] for row in read_lines(run / "metrics.jsonl")] == [1, 2]


def test_a_refused_run_leaves_no_folder_above_its_own_either(small, tmp_path):
    done = strop(
        "train", small.train, "--model.path", tmp_path / "no", "--run.folder", tmp_path / "runs" / "deep" / "x"
    )
    assert done.code == 2
    assert list(tmp_path.iterdir()) == []


def test_overwriting_waits_until_the_new_run_can_begin(small, tmp_path):
    run = tmp_path / "run"
    assert strop("train", small.train, "--num-steps", "1", "--run.folder", run).code == 0
    done = strop("train", small.train, "--model.path", tmp_path / "no", "--run.folder", run, "--run.overwrite")
    assert done.code == 2
    assert len(read_lines(run / "metrics.jsonl")) == 1
    assert (run / "model" / "model.safetensors").exists()


def test_overwriting_a_run_does_not_delete_the_model_that_the_new_run_starts_from(small, tmp_path):
    run = tmp_path / "run"
    assert strop("train", small.train, "--num-steps", "1", "--run.folder", run).code == 0
    done = strop("train", small.train, "--model.path", run / "model", "--run.folder", run, "--run.overwrite")
    assert (run / "model" / "model.safetensors").exists(), done.err


# ---- rewards --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function, says",
    [
        ("{}/nothing.py:score", "there is no file"),
        ("{}/reward.py:scores", "has no 'scores'"),
        ("{}/reward.py:REWARD", "has no 'REWARD'"),
        ("{}/reward.py:time", "of type module"),
        ("{}/reward.py", "module:function"),
        ("no_such_module:score", "there is no module 'no_such_module'"),
    ],
)
def test_a_reward_function_that_is_not_there_is_named_before_the_model_is_loaded(
    small, refused, function, says, tmp_path
):
    (tmp_path / "no").mkdir()
    (tmp_path / "no/config.json").write_text("{}")  # a folder that would fail as soon as a model is loaded from it
    flags = ("--reward.function", function.format(small.folder), "--model.path", tmp_path / "no")
    message = refused("train", small.train, *flags)
    assert "reward.function" in message
    assert says in message


@pytest.mark.parametrize("name, count", [("too_few", 15), ("too_many", 17)])
@pytest.mark.parametrize("on_error", ["fail", "zero", "exclude"])
def test_a_reward_function_that_returns_the_wrong_number_of_scores_stops_the_run(
    small, tmp_path, name, count, on_error
):
    """Case 25: 4 prompts x 4 samples; whatever on_error says."""
    run, function = tmp_path / "run", small.reward(name)
    flags = ("--reward.function", function, "--reward.batched", "--on-error", on_error, "--run.folder", run)
    done = strop("train", small.train, *flags)
    assert done.code == 2
    assert f"error: {function} must return one score for each rollout" in done.err
    assert f"got {count} scores for 16 rollouts" in done.err
    assert "Traceback" not in done.err
    assert not run.exists()


def test_a_reward_function_that_raises_stops_the_run_by_default(small, tmp_path):
    run, function = tmp_path / "run", small.reward("raises")
    done = strop("train", small.train, "--reward.function", function, "--run.folder", run)
    assert done.code == 2
    error = done.err.splitlines()[-1]
    assert error.startswith(f"error: {function}")
    assert [word for word in ("KeyError", "no such tool", "sample 1", "reward.on_error") if word not in error] == []
    assert not run.exists()


@pytest.mark.parametrize("on_error", ["fail", "zero"])
def test_the_traceback_of_a_reward_function_shows_its_own_error_and_no_other(small, tmp_path, on_error, caplog):
    flags = ("--reward.function", small.reward("raises"), "--on-error", on_error, "--num-steps", "1")
    strop("train", small.train, *flags, "--run.folder", tmp_path / "run")
    (record,) = [record for record in caplog.records if record.exc_info]
    text = logging.Formatter().format(record)
    assert "no such tool" in text
    assert "raise KeyError" in text
    assert "running event loop" not in text
    assert text.count("Traceback") == 1


def test_a_reward_function_that_raises_scores_zero_when_asked(small, tmp_path):
    run, function = tmp_path / "run", small.reward("raises")
    flags = ("--reward.function", function, "--on-error", "zero", "--num-steps", "1", "--run.folder", run)
    assert strop("train", small.train, *flags).code == 0
    rows = read_lines(run / "rollouts/step_000001.jsonl")
    assert [row["reward"] for row in rows if row["sample"] == 1] == [0.0] * 4
    (step,) = read_lines(run / "metrics.jsonl")
    assert (step["reward/num_errors"], step["reward/num_excluded"]) == (4, 0)
    assert step["reward"] == pytest.approx(sum(row["reward"] for row in rows) / 16, abs=1e-12)


def test_a_reward_function_that_raises_leaves_the_rollout_out_when_asked(small, tmp_path):
    run, function = tmp_path / "run", small.reward("raises")
    flags = ("--reward.function", function, "--on-error", "exclude", "--num-steps", "1", "--run.folder", run)
    assert strop("train", small.train, *flags).code == 0
    rows = read_lines(run / "rollouts/step_000001.jsonl")
    left_out = [row for row in rows if row["sample"] == 1]
    assert [(row["reward"], row["excluded"]) for row in left_out] == [(None, "scorer_error")] * 4
    (step,) = read_lines(run / "metrics.jsonl")
    assert (step["reward/num_errors"], step["reward/num_excluded"]) == (4, 4)
    kept = [row["reward"] for row in rows if row["sample"] != 1]
    assert step["reward"] == pytest.approx(sum(kept) / 12, abs=1e-12)


# ---- what does not fit ----------------------------------------------------------------------------------------------


@pytest.fixture
def long_prompts(tmp_path):
    """Row 1 has 124 tokens; with responses of 6 it does not fit the model's 128 positions."""
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "abc="}) + "\n" + json.dumps({"prompt": "a" * 123 + "="}) + "\n")
    return path


def test_a_prompt_that_does_not_fit_the_model_is_refused_before_the_run(small, refused, long_prompts):
    message = refused("train", small.train, "--data.path", long_prompts)
    assert [p for p in ("row 1", "124 tokens", "rollout.max_response_tokens = 6", "128") if p not in message] == []


def test_a_held_out_prompt_that_does_not_fit_the_model_is_refused_before_the_run(small, refused, long_prompts):
    message = refused("train", small.train, "--eval.data.kind", "jsonl", "--eval.data.path", long_prompts)
    assert [p for p in ("124", "128") if p not in message] == []


def test_a_held_out_response_limit_that_does_not_fit_the_model_is_refused_before_the_run(small, refused):
    message = refused("train", small.train, *small.eval_flags, "--eval.max_response_tokens", "200")
    assert [p for p in ("200", "128") if p not in message] == []


def test_a_demonstration_that_does_not_fit_the_model_is_refused_before_the_run(small, refused, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "abc=", "response": "a" * 200}) + "\n")
    message = refused("sft", small.sft, "--data.path", path)
    assert [p for p in ("205", "128") if p not in message] == []


def test_eval_refuses_a_prompt_that_does_not_fit_the_model(small, long_prompts):
    done = strop("eval", small.train, "--eval.data.kind", "jsonl", "--eval.data.path", long_prompts)
    assert done.code == 2
    assert [p for p in ("error: ", "124", "128") if p not in done.err] == []


def test_eval_without_held_out_prompts_says_which_table_to_add(small):
    done = strop("eval", small.train)
    assert (done.code, done.out) == (2, "")
    assert "eval.data must be given to evaluate" in done.err
    assert "[eval.data]" in done.err


def test_an_unknown_generated_dataset_is_refused_with_the_nearest_names(small, refused, tmp_path):
    config = tmp_path / "gym.toml"
    text = small.train.read_text().replace('kind = "jsonl"', 'kind = "reasoning_gym"\nname = "chain_sums"')
    config.write_text("\n".join(line for line in text.splitlines() if "train.jsonl" not in line))
    message = refused("train", config)
    assert "data.name must be a dataset of reasoning-gym, got 'chain_sums'" in message
    assert "chain_sum" in message.replace("chain_sums", "")
