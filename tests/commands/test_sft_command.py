"""strop sft through its command: epochs, averages, cuts, validation, the best model, and messages."""

import json
import math

import pytest
from commands.sft_runs import conversation, runner, validating, write_sft_small
from commands.small_runs import metrics, same_weights, strop


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_sft_small(tmp_path_factory.mktemp("sft"))


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    return runner(small, lambda: tmp_path_factory.mktemp("run"))


def by_hand(model_folder, rows):
    """Negative log-probability of every learned token, one row at a time in float64: a turn's letters and its <|im_end|>."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_folder).double()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    found = []
    for messages in rows:
        ids, learned = [], []
        for message in messages:
            head = tokenizer.encode(f"<|im_start|>{message['role']}\n")
            body = tokenizer.encode(f"{message['content']}<|im_end|>")
            ids += [*head, *body, *tokenizer.encode("\n")]
            learned += [False] * len(head) + [message["role"] == "assistant"] * len(body) + [False]
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        found.append([-float(logprobs[t - 1, ids[t]].detach()) for t in range(1, len(ids)) if learned[t]])
    return found


def mean(values):
    return sum(values) / len(values)


def num_tokens(number):
    """Of a conversation: role and content, one token a character, and two special tokens and two line feeds a turn."""
    return sum(len(m["role"]) + len(m["content"]) + 4 for m in conversation(number))


# ---- the loss -------------------------------------------------------------------------------------------------------


def test_the_first_loss_is_that_of_the_assistant_s_tokens_under_each_reduction(small, run):
    flags = ("--num-steps", "1", "--batch-size", "18", "--max-length-tokens", "60")
    nll = by_hand(small / "start", [conversation(n) for n in range(18)])
    expected = {
        "token_mean": mean([x for row in nll for x in row]),
        "sequence_mean": mean([mean(row) for row in nll]),
        "constant_length": mean([sum(row) / 60 for row in nll]),
    }
    losses = {name: metrics(run(*flags, "--reduction", name))[0]["loss"] for name in expected}
    assert losses == pytest.approx(expected, rel=1e-5)
    assert "mean over its learned tokens" in (run(*flags, "--reduction", "sequence_mean") / "objective.txt").read_text()


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize(
    "cut", [("--max-tokens-per-micro-batch", "1"), ("--max-tokens-per-micro-batch", "90"), ("--layout", "packed")]
)
def test_loss_and_gradient_are_the_same_however_a_step_is_cut_or_packed(run, reduction, cut):
    flags = ("--num-steps", "1", "--batch-size", "18", "--reduction", reduction)
    (whole,), (parts,) = metrics(run(*flags)), metrics(run(*flags, *cut))
    for name in ("loss", "nll", "grad_norm"):
        assert parts[name] == pytest.approx(whole[name], rel=2e-5), name


def test_the_padding_share_is_that_of_the_forward_passes(run):
    """2 conversations in rows as long as the longer one, and each alone."""
    flags = ("--num-steps", "1", "--batch-size", "2", "--data.shuffle", "false", "--layout", "padded")
    lengths = [num_tokens(n) for n in range(2)]
    assert 0 < 2 * max(lengths) - sum(lengths) <= 40  # less than a pass
    whole = metrics(run(*flags))[0]["padding_share"]
    assert whole == pytest.approx(1 - sum(lengths) / (2 * max(lengths)))
    assert metrics(run(*flags, "--max-tokens-per-micro-batch", "1"))[0]["padding_share"] == 0


# ---- epochs ---------------------------------------------------------------------------------------------------------


def test_epochs_take_every_demonstration_so_often_and_the_last_batch_is_what_is_left(small, run):
    """2 x 18 demonstrations in batches of 8: four of 8 and one of 4, whose loss is a mean over its own tokens."""
    flags = (
        "--num-steps",
        "none",
        "--num-epochs",
        "2",
        "--batch-size",
        "8",
        "--data.shuffle",
        "false",
        "--lr",
        "1e-12",
    )
    rows = metrics(run(*flags))
    assert [row["epoch"] for row in rows] == pytest.approx([8 / 18, 16 / 18, 24 / 18, 32 / 18, 2])
    nll = by_hand(small / "start", [conversation(n) for n in range(18)])
    expected = [mean([x for n in range(s, min(s + 8, 36)) for x in nll[n % 18]]) for s in range(0, 36, 8)]
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-5)


def test_without_a_number_of_steps_there_is_one_pass(small, run):
    assert [row["step"] for row in metrics(run("--num-steps", "none"))] == [1, 2, 3, 4, 5]  # 18 in fours


def test_a_schedule_over_epochs_ends_with_the_run(run):
    flags = ("--num-steps", "none", "--num-epochs", "2", "--batch-size", "9", "--lr-schedule", "linear")
    assert [row["lr"] for row in metrics(run(*flags))] == pytest.approx([0.02, 0.015, 0.01, 0.005])


def test_a_warmup_longer_than_the_epochs_is_refused_with_the_arithmetic(small, tmp_path):
    flags = ("--num-steps", "none", "--warmup-steps", "5", "--run.folder", tmp_path / "run")
    done = strop("sft", small / "sft.toml", *flags)
    assert done.code == 2
    product = "run.num_epochs = 1 x 18 demonstrations / data.batch_size = 4"
    assert f"trainer.warmup_steps must be below the run's 5 optimizer steps ({product}), got 5" in done.err
    assert not (tmp_path / "run").exists()


# ---- validation -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def validated(small, run):
    return run(*validating(small), "--num-steps", "5")


def test_the_validation_loss_is_the_mean_over_all_held_out_tokens_before_during_and_after(small, validated):
    rows = {row["step"]: row for row in metrics(validated)}
    assert [step for step, row in rows.items() if "validation/loss" in row] == [0, 2, 4, 5]
    assert set(rows) == {0, 1, 2, 3, 4, 5}
    held_out = [conversation(n) for n in range(18, 25)]
    for step, model in ((0, small / "start"), (5, validated / "model")):
        loss = mean([x for row in by_hand(model, held_out) for x in row])
        assert rows[step]["validation/loss"] == pytest.approx(loss, rel=1e-5)
        assert rows[step]["validation/perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


def test_the_validation_loss_does_not_depend_on_how_it_is_cut(small, run, validated):
    cut = run(*validating(small), "--num-steps", "5", "--max-tokens-per-micro-batch", "1")
    assert metrics(cut)[0]["validation/loss"] == pytest.approx(metrics(validated)[0]["validation/loss"], rel=1e-6)


def test_validating_changes_nothing_of_what_is_learned(run, validated):
    assert same_weights(run("--num-steps", "5") / "model", validated / "model")


def test_the_best_model_is_kept_with_its_step_and_loss(small, run):
    """A rate so high that the loss rises again: the best is neither the first nor the last."""
    flags = validating(small, "--validation.every_steps", "1", "--lr", "0.06", "--num-steps", "12")
    flags = (flags[0], flags[1], *flags[4:])
    folder = run(*flags)
    losses = {row["step"]: row["validation/loss"] for row in metrics(folder)}
    best = min(losses, key=losses.get)
    assert 0 < best < 12, losses
    assert json.loads((folder / "best/best.json").read_text()) == {"step": best, "validation_loss": losses[best]}
    loss = mean([x for row in by_hand(folder / "best", [conversation(n) for n in range(18, 25)]) for x in row])
    assert loss == pytest.approx(losses[best], rel=1e-5)
    assert not same_weights(folder / "best", folder / "model")
    assert (
        f"best (after step {best}, validation loss {losses[best]:.4f}): {folder}/best"
        in (folder / "said.txt").read_text()
    )


def test_a_run_that_only_gets_worse_keeps_the_model_it_began_with_and_stops_when_patience_ends(small, run):
    flags = (
        "--validation.data.path",
        small / "held_out.jsonl",
        "--validation.every_steps",
        "1",
        "--lr",
        "5",
        "--num-steps",
        "50",
    )
    folder = run(*flags, "--validation.patience", "3")
    assert [row["step"] for row in metrics(folder)] == [0, 1, 2, 3]
    assert same_weights(folder / "best", small / "start")
    said = (folder / "said.txt").read_text()
    assert "stopped after step 3: no lower validation loss in the last 3 validations (validation.patience)" in said
    assert (folder / "model").exists()


def test_without_keep_best_there_is_no_best_folder(small, run):
    folder = run(*validating(small, "--validation.keep_best", "false"))
    assert not (folder / "best").exists()
    assert "best (after" not in (folder / "said.txt").read_text()


def test_the_report_has_curves_of_the_validation_and_the_console_its_lines(validated):
    report = (validated / "report.html").read_text()
    assert report.index("<b>validation/loss</b>") < report.index("<b>grad_norm</b>")
    said = (validated / "said.txt").read_text().splitlines()
    assert [line.split(":")[0] for line in said if line.startswith("validation")] == [
        f"validation after step {n}" for n in (0, 2, 4, 5)
    ]
    (line,) = [line for line in said if line.startswith("step 5/5")]
    assert "  val " in line


# ---- what is told ---------------------------------------------------------------------------------------------------


def test_demonstrations_that_are_left_out_or_cut_are_counted(small, tmp_path):
    flags, count = ("--max-length-tokens", "50", "--num-steps", "1"), sum(num_tokens(n) > 50 for n in range(18))
    assert count > 0
    for way, what in (("drop", "left out"), ("truncate", "cut")):
        done = strop("sft", small / "sft.toml", *flags, "--too-long", way, "--run.folder", tmp_path / way)
        assert done.code == 0, done.err
        assert (
            f"warning: data: {count} demonstrations of more than 50 tokens were {what}, as data.too_long = {way} asks."
            in done.out
        )


def test_what_was_left_out_of_both_files_is_in_the_first_line_of_metrics_and_in_the_result(small, tmp_path):
    """Step 0 is the first line of a run with a validation, step 1 of one without."""
    import strop as package

    (tmp_path / "train.jsonl").write_text("{broken\n\n" + (small / "train.jsonl").read_text())
    limit = {"data.path": f"{tmp_path}/train.jsonl", "data.max_length_tokens": 50, "data.too_long": "drop"}
    limit |= {"run.folder": f"{tmp_path}/run", "data.skip_bad_lines": True}
    held_out = {"path": f"{small}/held_out.jsonl", "max_length_tokens": 50, "too_long": "truncate"}
    held_out = {f"validation.data.{name}": value for name, value in held_out.items()}
    long = {"train": sum(num_tokens(n) > 50 for n in range(18)), "held": sum(num_tokens(n) > 50 for n in range(18, 25))}
    counts = {
        "data/num_skipped_lines": 1,
        "data/num_dropped": long["train"],
        "validation.data/num_truncated": long["held"],
    }
    config = package.load_config(str(small / "sft.toml"), {**limit, **held_out, "run.num_steps": 2}, command="sft")
    result = package.sft(config)
    first, *others = metrics(tmp_path / "run")
    assert first["step"] == 0
    assert {name: value for name, value in first.items() if name.startswith(("data/", "validation.data/"))} == counts
    assert not any(name.startswith(("data/", "validation.data/")) for row in others for name in row)
    zeros = dict.fromkeys(("data/num_truncated", "validation.data/num_skipped_lines", "validation.data/num_dropped"), 0)
    assert result.left_out == counts | zeros
    config = package.load_config(str(small / "sft.toml"), limit | {"run.overwrite": True}, command="sft")
    first = package.sft(config).steps[0]
    assert (first["step"], first["data/num_skipped_lines"], first["data/num_dropped"]) == (1, 1, long["train"])


def test_train_on_last_is_said_to_change_nothing_where_all_rows_are_a_prompt_and_a_response(small, tmp_path):
    pairs = [json.dumps({"prompt": "a", "response": "b"}) + "\n"] * 4
    (tmp_path / "pairs.jsonl").write_text("".join(pairs))
    (tmp_path / "mixed.jsonl").write_text("".join([*pairs, json.dumps({"messages": conversation(1)})]))
    said = 'warning: data.train_on = "last" changes nothing: all rows are a prompt and a response, and that is learned anyway.'
    for name, train_on, count in (("pairs", "last", 1), ("mixed", "last", 0), ("pairs", "assistant", 0)):
        flags = ("--data.path", tmp_path / f"{name}.jsonl", "--data.train_on", train_on, "--num-steps", "1")
        done = strop("sft", small / "sft.toml", *flags, "--run.folder", tmp_path / f"{name}_{train_on}")
        assert done.code == 0, done.err
        assert done.out.count(said) == count, name


def test_a_turn_that_ends_where_nobody_would_stop_is_said(small, tmp_path):
    import shutil

    shutil.copytree(small / "start", tmp_path / "start")
    (tmp_path / "start/generation_config.json").write_text('{"eos_token_id": 2}')
    flags = ("--num-steps", "1", "--run.folder", tmp_path / "run")
    done = strop("sft", small / "sft.toml", *flags, "--model.path", tmp_path / "start")
    assert "warning: data: turns end with <|im_end|> (id 4), at which the model does not stop" in done.out
    assert (
        "turns end with" not in strop("sft", small / "sft.toml", "--num-steps", "1", "--run.folder", tmp_path / "a").out
    )


@pytest.mark.parametrize(
    "flags, said",
    [
        (("--num-epochs", "2"), "run.num_epochs = 2 cannot act beside run.num_steps"),
        (("--validation.patience", "2"), "validation.patience = 2 cannot act without validation.data"),
        (
            ("--validation.data.path", "x", "--validation.patience", "2"),
            "validation.patience = 2 is only used when validation.every_steps is above 0",
        ),
        (
            ("--validation.data.path", "x", "--validation.data.batch_size", "2"),
            "validation.data.batch_size = 2 cannot act",
        ),
        (("--data.kind", "parquet", "--data.skip_bad_lines", "true"), "data.skip_bad_lines = True cannot act"),
        (
            ("--reduction", "constant_length"),
            "data.max_length_tokens must be given with loss.reduction = constant_length",
        ),
        (("--max-length-tokens", "400"), "data.max_length_tokens must be at most the model's 128 positions, got 400"),
        (("--validation.data.path", "none.jsonl"), "none.jsonl: there is no such file"),
    ],
)
def test_what_cannot_act_or_is_wrong_is_refused_and_nothing_is_written(small, tmp_path, flags, said):
    done = strop("sft", small / "sft.toml", *flags, "--run.folder", tmp_path / "run")
    assert done.code == 2
    assert said in done.err
    assert not (tmp_path / "run").exists()


def test_explain_prints_the_objective_of_an_sft_config(small):
    done = strop("explain", "--sft", small / "sft.toml")
    assert "minimise  -(mean over the step's learned tokens of logprobs_t)" in done.out
