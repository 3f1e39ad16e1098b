"""strop eval, strop explain and strop doctor: what they print."""

import json

import pytest
from commands.small_runs import read_lines, small_once, strop, strop_process


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.fixture(autouse=True)
def _on_a_wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")


# ---- eval -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval") / "run"
    assert strop("train", small.train, *small.eval_flags, "--run.folder", folder).code == 0
    return folder


def test_eval_of_a_run_folder_gives_the_numbers_of_its_last_evaluation(run, tmp_path):
    """In a process of its own: stdout is JSON and nothing else, and nothing is written."""
    done = strop_process("eval", run, "--json", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    scores, last = json.loads(done.out), read_lines(run / "metrics.jsonl")[-1]
    for name in ("greedy", "sampled"):
        assert scores[name]["reward"] == last[f"eval/{name}_reward"]
        assert scores[name]["num_prompts"] == 8
    assert list(tmp_path.iterdir()) == []


def test_eval_of_a_config_scores_the_model_that_it_names(small, run):
    first = read_lines(run / "rollouts/eval_000000.jsonl")
    scores = json.loads(strop("eval", small.train, *small.eval_flags, "--json").out)
    assert scores["greedy"]["reward"] == pytest.approx(sum(r["reward"] for r in first[:8]) / 8, abs=1e-12)
    assert scores["sampled"]["reward"] == pytest.approx(sum(r["reward"] for r in first[8:]) / 8, abs=1e-12)


def test_eval_flags_win_over_what_the_run_folder_says(small, run):
    of_start = json.loads(strop("eval", run, "--model.path", small.start, "--json").out)
    of_run = json.loads(strop("eval", run, "--json").out)
    assert of_start != of_run
    assert of_start == json.loads(strop("eval", small.train, *small.eval_flags, "--json").out)


def test_short_names_in_eval_are_those_of_eval(small):
    given = strop("eval", small.train, *small.eval_flags, "--json", "--temperature", ".5", "--num-samples", "3")
    whole = ("--eval.temperature", ".5", "--eval.num_samples", "3")
    assert given.code == 0, given.err
    assert given == strop("eval", small.train, *small.eval_flags, "--json", *whole)
    assert given != strop("eval", small.train, *small.eval_flags, "--json", "--eval.num_samples", "3")


@pytest.mark.parametrize(
    "flags",
    [
        ("--greedy", "false"),
        ("--num-samples", "0"),
        ("--num-samples", "3"),
        ("--temperature", "0.3"),
        ("--top-p", "0.5"),
        ("--top-k", "2"),
        ("--eval.max_response_tokens", "3"),
        ("--rollout.max_response_tokens", "3"),
        ("--stop-token-ids", "[4]"),
        ("--max-prompts", "5"),
        ("--seed", "1"),
    ],
    ids=" ".join,
)
def test_each_option_of_an_evaluation_moves_its_scores(small, flags):
    held_out = small.eval_flags[:4]
    plain = strop("eval", small.train, *held_out, "--max-prompts", "8", "--json")
    flags = flags if "--max-prompts" in flags else (*flags, "--max-prompts", "8")
    other = strop("eval", small.train, *held_out, *flags, "--json")
    assert (plain.code, other.code) == (0, 0), other.err
    assert json.loads(other.out) != json.loads(plain.out)


def test_eval_prints_a_table_and_as_many_answers_as_asked(run):
    done = strop("eval", run, "--show", "2")
    assert done.code == 0
    answers = [row["prompt"] for row in read_lines(run / "rollouts/eval_000003.jsonl")[:3]]
    assert [prompt in done.out for prompt in answers] == [True, True, False]
    assert [word for word in ("greedy", "sampled", "reward", "+-", "8") if word not in done.out] == []


# ---- explain --------------------------------------------------------------------------------------------------------


def options_of(text):
    """Option to (value, origin) of the table that explain prints, columns apart by two spaces or more."""
    rows = {}
    for line in text.splitlines():
        parts = [part.strip() for part in line.split("  ") if part.strip()]
        if len(parts) >= 3 and ("." in parts[0] or parts[0] == "seed"):
            rows[parts[0]] = (parts[1], parts[2])
    return rows


def test_explain_shows_every_option_with_its_value_and_origin_and_the_formula(small, tmp_path):
    """In a process of its own."""
    flags = ("--algorithm.preset", "cispo", "--eps-clip-high", "2.5", "--algorithm.reduction", "prompt_mean")
    done = strop_process("explain", small.train, *flags, cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    rows = options_of(done.out)
    assert rows["algorithm.policy_loss.kind"] == ("cispo", "preset cispo")
    assert rows["algorithm.policy_loss.eps_clip"] == ("1.0", "preset cispo")
    assert rows["algorithm.policy_loss.eps_clip_high"] == ("2.5", "command line")
    assert rows["algorithm.reduction"] == ("prompt_mean", "command line")
    assert rows["rollout.group_size"] == ("4", str(small.train))
    assert rows["trainer.weight_decay"] == ("0.0", "default")
    assert rows["algorithm.kl.coef"] == ("0.0", "preset cispo")
    assert "loss_t = -stop_gradient(clip(r_t, 0, 3.5)) A_t logprobs_t" in done.out  # 1 + 2.5
    assert "w_t = 1 / (prompts of the step x trainable tokens of its prompt)" in done.out
    assert "batch: 4 prompts x 4 samples = 16 sequences of at most 6 tokens" in done.out
    assert "2 optimizer steps of 8 sequences -> 6 optimizer steps in 3 batches" in done.out
    assert "warning" not in done.out
    assert list(tmp_path.iterdir()) == []


def test_explain_lists_each_option_of_the_config_once(small):
    from strop.config import load_config
    from strop.config.tree import values

    done = strop("explain", small.train)
    assert set(options_of(done.out)) == set(values(load_config(small.train)))


def test_a_short_name_in_explain_and_train_is_never_an_option_of_eval(small):
    rows = options_of(strop("explain", small.train, "--temperature", "0.5").out)
    assert rows["rollout.temperature"] == ("0.5", "command line")
    assert rows["eval.temperature"] == ("1.0", "default")
    for command in ("explain", "train"):
        done = strop(command, small.train, *small.eval_flags, "--top-p", ".9")
        assert (done.code, done.out) == (2, "")
        assert "top_p is valid as eval.top_p; write the whole path" in done.err


def test_explain_of_an_sft_config_has_no_policy(small):
    done = strop("explain", "--sft", small.sft, "--lr", "0.5")
    assert done.code == 0
    rows = options_of(done.out)
    assert rows["trainer.lr"] == ("0.5", "command line")
    assert rows["data.batch_size"] == ("8", str(small.sft))
    assert not [name for name in rows if name.startswith(("algorithm", "rollout", "reward"))]
    assert "objective" not in done.out


@pytest.mark.parametrize("command", ["explain", "train", "eval"])
def test_a_config_of_sft_given_to_another_command_is_refused_in_one_line_that_says_so(small, command):
    done = strop(command, small.sft)
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert f"{small.sft} is a config of strop sft" in done.err


@pytest.mark.parametrize("command", [["sft"], ["explain", "--sft"]])
def test_a_config_of_train_given_to_sft_is_refused_in_one_line_that_says_so(small, command):
    done = strop(*command, small.train)
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert f"{small.train} is a config of strop train" in done.err


@pytest.mark.parametrize("command", ["explain", "train"])
@pytest.mark.parametrize("eps_clip, warned", [("0.2", True), ("1.0", False)])
def test_cispo_with_a_lower_bound_is_warned_of(small, tmp_path, command, eps_clip, warned):
    flags = (
        "--algorithm.preset",
        "cispo",
        "--eps-clip",
        eps_clip,
        "--num-steps",
        "1",
        "--run.folder",
        tmp_path / "run",
    )
    done = strop(command, small.train, *flags)
    assert done.code == 0
    warning = "warning: CISPO with eps_clip = 0.2 keeps a lower bound of 0.8 on the weight"
    assert (warning in done.out) == warned
    assert ("warning" in done.out) == warned


def test_k1_in_the_loss_is_refused_and_its_unbiased_form_is_explained(small):
    flags = ("--coef", "0.1", "--algorithm.kl.kind", "k1")
    refused = strop("explain", small.train, *flags)
    assert refused.code == 2
    assert "algorithm.kl.kind must not be k1 in the loss, got k1" in refused.err
    assert refused.out == ""
    done = strop("explain", small.train, *flags, "--unbiased")
    assert done.code == 0
    assert "+ 0.1 kl_t" in done.out
    assert "kl_t = r_t (d_t)," in done.out


def test_the_flag_of_slime_names_a_preset(small):
    rows = options_of(strop("explain", small.train, "--advantage-estimator", "grpo").out)
    assert rows["algorithm.preset"] == ("grpo", "command line")
    assert rows["algorithm.kl.coef"] == ("0.04", "preset grpo")


# ---- doctor ---------------------------------------------------------------------------------------------------------


def test_doctor_names_versions_devices_engines_and_trainers(tmp_path):
    import torch

    from strop import __version__

    done = strop_process("doctor", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert f"strop {__version__}" in done.out
    assert torch.__version__ in done.out
    words = (
        "devices: cpu",
        "engines:",
        "make vllm-env",
        "into .venv-sglang",
        "trainers:",
        "or in several (trainer.num_processes)",
    )
    assert [word for word in words if word not in done.out] == []
