"""strop replay, strop rollout and strop train --from-rollouts, through the commands."""

import json
import math
import shutil
from pathlib import Path

import pytest
from commands.small_runs import metrics, read_lines, refusing, same_weights, small_once, strop

from strop.config import load_config
from strop.runtime.recording import recorded_weights
from strop.runtime.replay import replay as redo


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.fixture
def refused(tmp_path):
    return refusing(tmp_path)


FOUR = ("--num-steps", "4")
SAVING = (*FOUR, "--checkpoint-every-steps", "2", "--keep-checkpoints", "9")


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    """A run of four steps with checkpoints after the second and the fourth."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    assert strop("train", small.train, *SAVING, "--run.folder", folder).code == 0
    return folder


@pytest.fixture
def copied(run, tmp_path):
    """The run in a place where it may be spoilt."""
    folder = tmp_path / "copy"
    shutil.copytree(run, folder)
    return folder


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ---- replay ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step, start", [(1, "the model that the run began with"), (4, "checkpoint step_000002")])
def test_a_step_is_redone_bit_for_bit_and_the_run_folder_stays_as_it_is(run, step, start):
    before = contents(run)
    done = strop("replay", run, "--step", step)
    assert done.code == 0, done
    assert f"step {step}, from {start}" in done.out
    row = metrics(run)[step - 1]
    assert done.out.count(repr(row["loss"])) == done.out.count(repr(row["grad_norm"])) == 2
    assert done.out.splitlines()[-1] == "identical"
    assert contents(run) == before


# What a step may depend on beside its rollouts: a critic, a reference that moves and a coefficient that follows it, groups
# that waited, named rewards, tokens masked at the limit.
@pytest.mark.parametrize(
    "flags",
    [
        ("--algorithm.preset", "ppo", "--only-first-steps", "1"),
        ("--coef", "0.1", "--kl.target", "0.01", "--refresh-steps", "2", "--mask-truncated"),
        ("--filter.equal_rewards", "--filter.surplus", "keep", "--prompts-per-round", "6", "--old-logprobs", "rollout"),
    ],
    ids=["critic", "reference", "waiting groups"],
)
@pytest.mark.parametrize("every", ["0", "2"])
def test_a_step_that_depends_on_more_than_its_rollouts_is_redone_too(small, tmp_path, flags, every):
    flags = [flag.replace("--kl.", "--algorithm.kl.") for flag in flags]
    folder = tmp_path / "run"
    done = strop("train", small.train, *FOUR, *flags, "--checkpoint-every-steps", every, "--run.folder", folder)
    assert done.code == 0, done
    done = strop("replay", folder, "--step", 3)
    assert (done.code, done.out.splitlines()[-1]) == (0, "identical"), done


def spoil(path, line, **changes):
    rows = read_lines(path)
    rows[line - 1] |= changes
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_another_reward_is_said_to_differ_first_in_the_loss(copied):
    spoil(copied / "rollouts/step_000003.jsonl", 1, reward=5.0)
    done = strop("replay", copied, "--step", 3)
    assert done.code == 1
    assert "stopped: the step differs. step 3: loss was " in done.err
    assert "identical" not in done.out


def test_a_difference_in_an_earlier_step_is_the_one_that_is_named(copied):
    shutil.rmtree(copied / "checkpoints")
    spoil(copied / "rollouts/step_000002.jsonl", 1, reward=5.0)
    done = strop("replay", copied, "--step", 4)
    assert done.code == 1
    assert "the step differs. step 2: loss was " in done.err


def test_weights_that_differ_where_every_metric_is_the_same_are_found(copied):
    path = copied / "rollouts/weights.jsonl"
    rows = read_lines(path)
    path.write_text(
        "".join(json.dumps(row | ({"policy": "00000000"} if row["step"] == 3 else {})) + "\n" for row in rows)
    )
    done = strop("replay", copied, "--step", 3)
    assert done.code == 1
    assert "after step 3: the weights of the policy had checksum 00000000 and have " in done.err


def test_damaged_checksums_are_left_out(tmp_path):
    (tmp_path / "weights.jsonl").write_bytes(b"[" * 99999 + b'\n\xff\n{"step": 2, "policy": "ab"}\n{"step": 3, "pol')
    assert recorded_weights(tmp_path) == {2: {"policy": "ab"}}


def test_another_start_model_is_found_before_any_step(small, copied):
    from transformers import AutoModelForCausalLM

    other = copied.parent / "other"
    shutil.copytree(small.start, other)
    model = AutoModelForCausalLM.from_pretrained(other)
    model.get_input_embeddings().weight.data[3, 0] += 1e-3
    model.save_pretrained(other)
    done = strop("replay", copied, "--step", 1, "--model.path", other)
    assert done.code == 1
    assert "before the first step: the weights of the policy had checksum " in done.err


def test_the_parts_of_all_rollouts_add_up_to_the_loss_of_the_step(small, tmp_path):
    flags = ("--prompts-per-step", "2", "--group-size", "2", "--updates-per-batch", "1", "--num-steps", "1")
    assert strop("train", small.train, *flags, "--run.folder", tmp_path / "run").code == 0
    config = load_config(tmp_path / "run/config.toml")
    found = [redo(tmp_path / "run", config, step=1, rollout=line) for line in (1, 2, 3, 4)]
    total = sum(row.weight * row.loss for one in found for row in one.tokens if row.is_trained)
    assert total == pytest.approx(metrics(tmp_path / "run")[0]["loss"], abs=1e-6)
    for one, recorded in zip(found, read_lines(tmp_path / "run/rollouts/step_000001.jsonl"), strict=True):
        assert [row.token for row in one.tokens] == recorded["tokens"]
        trained = [row for row in one.tokens if row.is_trained]
        assert [row.rollout_logprob for row in trained] == pytest.approx(recorded["rollout_logprobs"], abs=1e-7)
        assert [row.logprob for row in trained] == pytest.approx(recorded["rollout_logprobs"], abs=1e-5)
        assert {row.ratio for row in trained} == {1.0}
        assert [row.loss for row in trained] == pytest.approx([-row.advantage for row in trained], abs=1e-6)


def test_the_tokens_of_a_second_update_show_how_far_the_policy_has_moved(run):
    done = strop("replay", run, "--step", 3, "--rollout", 16)
    assert done.code == 0, done
    (recorded,) = read_lines(run / "rollouts/step_000003.jsonl")[15:]
    rows = [line.split() for line in done.out.splitlines() if " T " in line]
    assert [int(row[0]) for row in rows] == recorded["tokens"][-len(rows) :]
    for row in rows:
        old, now, ratio = map(float, row[-6:-3])
        assert ratio == pytest.approx(math.exp(now - old), rel=1e-3)
        assert ratio != 1.0


def test_what_cannot_be_replayed_is_refused_with_what_is_missing(small, run, copied, tmp_path):
    def message(*words):
        done = strop("replay", *words)
        assert done.code == 2, done
        return done.err

    assert "it has no config.toml" in message(small.start, "--step", 1)
    assert "got 9: it has steps 1 to 4" in message(run, "--step", 9)
    assert "from 1 to 16, got 17" in message(run, "--step", 1, "--rollout", 17)
    (copied / "rollouts/step_000003.jsonl").unlink()
    assert "got none of step 3" in message(copied, "--step", 4)
    text = tmp_path / "text"
    assert strop("train", small.train, "--num-steps", "1", "--rollout-form", "text", "--run.folder", text).code == 0
    assert "run.rollout_form = whole" in message(text, "--step", 1)


# ---- rollout --------------------------------------------------------------------------------------------------------


def test_rollouts_without_training_are_those_of_the_first_step_and_no_trainer_is_made(
    small, run, tmp_path, monkeypatch
):
    def refuse(*args, **more):
        raise AssertionError("a trainer is made")

    monkeypatch.setattr("strop.runtime.trainer_kinds.TorchTrainer", refuse)
    done = strop("rollout", small.train, "--num-steps", "2", "-o", tmp_path / "out")
    assert done.code == 0, done
    first = "step_000001.jsonl"
    assert (tmp_path / "out" / first).read_bytes() == (run / "rollouts" / first).read_bytes()
    rows = [row for n in (1, 2) for row in read_lines(tmp_path / f"out/step_{n:06d}.jsonl")]
    assert {version for row in rows for version in row["policy_versions"]} == {0}
    (line,) = [line for line in done.out.splitlines() if line.startswith("│ all")]
    cells = [cell.strip() for cell in line.split("│")[2:-1]]
    assert cells[:2] == ["32", "32"]
    assert float(cells[2]) == pytest.approx(sum(row["reward"] for row in rows) / 32, abs=1e-3)
    assert float(cells[6]) == pytest.approx(sum(row["num_response_tokens"] for row in rows) / 32, abs=0.06)
    assert [line.split()[1] for line in done.out.splitlines() if line.startswith("step ")] == ["1/2", "2/2"]


def test_rollouts_are_not_written_over(small, run):
    done = strop("rollout", small.train, "-o", run / "rollouts")
    assert done.code == 2
    assert "--output must be a folder without rollouts" in done.err


# ---- training on rollouts -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def off_policy(small, tmp_path_factory):
    """A run whose ratios are to the sampler's log-probabilities, as those of recorded rollouts are."""
    folder = tmp_path_factory.mktemp("off") / "run"
    assert strop("train", small.train, *FOUR, "--old-logprobs", "rollout", "--run.folder", folder).code == 0
    return folder


def test_training_on_a_run_s_rollouts_makes_the_run_again_without_an_engine(small, off_policy, tmp_path, monkeypatch):
    def refuse(*args, **more):
        raise AssertionError("an engine is made")

    monkeypatch.setattr("strop.runtime.session.TorchEngine", refuse)
    folder = tmp_path / "again"
    done = strop("train", small.train, *FOUR, "--from-rollouts", off_policy, "--run.folder", folder)
    assert done.code == 0, done
    assert same_weights(folder / "model", off_policy / "model")
    assert [row["loss"] for row in metrics(folder)] == [row["loss"] for row in metrics(off_policy)]
    assert "ratios are to the recorded log-probabilities (algorithm.old_logprobs = rollout)" in done.out
    assert "old_logprobs: as recorded when the rollouts were sampled" in (folder / "objective.txt").read_text()


def test_two_steps_on_rollouts_then_resuming_equals_four_at_once(small, off_policy, tmp_path):
    flags = ("--from-rollouts", off_policy, "--checkpoint-every-steps", "1", "--run.folder", tmp_path / "part")
    assert strop("train", small.train, "--num-steps", "2", *flags).code == 0
    assert strop("train", small.train, *FOUR, *flags, "--resume").code == 0
    assert same_weights(tmp_path / "part/model", off_policy / "model")


def test_a_correction_keeps_the_trainer_s_log_probabilities_and_says_so(small, run, tmp_path):
    flags = ("--algorithm.correction.kind", "truncate", "--run.folder", tmp_path / "run")
    done = strop("train", small.train, *FOUR, "--from-rollouts", run, *flags)
    assert done.code == 0, done
    assert "algorithm.correction weighs the gap" in done.out
    assert metrics(tmp_path / "run")[0]["correction_weight"] == pytest.approx(1, abs=1e-3)


def test_a_loss_that_corrects_for_nothing_is_warned_of(small, run, tmp_path):
    flags = ("--old-logprobs", "trainer", "--run.folder", tmp_path / "run")
    done = strop("train", small.train, *FOUR, "--from-rollouts", run, *flags)
    assert done.code == 0, done
    assert "nothing corrects for it" in done.out


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--num-steps", "5"), "run.num_steps must be at most 4"),
        (("--rollout.temperature", "0.9"), "rollout.temperature must be 1.0 as in"),
        (("--group-size", "3"), "rollout.group_size must be 4 as in"),
        (("--prompts-per-step", "2"), "rollout.prompts_per_step must be 4 as in"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_rollouts_of_another_kind_are_refused(small, run, refused, flags, message):
    assert message in refused(
        "train", small.train, *FOUR[: 0 if "--num-steps" in flags else 2], *flags, "--from-rollouts", run
    )


def test_rollouts_that_do_not_fit_the_model_or_are_none_are_refused(small, copied, refused, tmp_path):
    given = ("train", small.train, *FOUR, "--from-rollouts")
    path = copied / "rollouts/step_000001.jsonl"
    spoil(path, 2, tokens=[99, *read_lines(path)[1]["tokens"][1:]])
    assert f"{path}:2: token ids must be from 0 to 10, the model's vocabulary, got 99" in refused(*given, copied)
    for text, message in (("[" * 99999, "the file is broken"), ("{}", "it does not say temperature, prompts_per_step")):
        (copied / "rollouts/about.json").write_text(text)
        assert message in refused(*given, copied)
    (copied / "rollouts/about.json").unlink()
    assert "says in about.json" in refused(*given, copied)
    assert "it has none" in refused(*given, small.start)
    assert "there is no such folder" in refused(*given, tmp_path / "nowhere")


@pytest.mark.parametrize("source", ["", "rollouts", "guards"])
@pytest.mark.parametrize("how", ["--overwrite", "--resume"])
def test_a_run_never_replaces_what_it_is_to_learn_from(small, copied, source, how):
    if source == "guards":
        shutil.copytree(copied / "rollouts", copied / "guards")
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    done = strop("train", small.train, *FOUR, how, "--run.folder", copied, "--from-rollouts", copied / source)
    assert done.code == 2
    assert "rollout.from_folder must lie outside of what the run writes" in done.err
    assert {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == before


def test_a_run_from_another_model_is_warned_of(small, run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(small.start, other)
    flags = ("--num-steps", "1", "--model.path", other, "--run.folder", tmp_path / "run")
    done = strop("train", small.train, *flags, "--from-rollouts", run)
    assert done.code == 0, done
    assert f"was sampled from {small.start}, and model.path = {other}" in done.out
    assert Path(tmp_path / "run/model").is_dir()
