"""Whole runs of trainer.kind = megatron: the numbers of the trainer torch, resumed in every layout, refused, and lost ranks."""

import shutil
import signal

import pytest
import rank_processes
import tiny_models
import torch
from commands.small_runs import metrics, read_lines, refusing, same_weights, small_once, strop, weights
from rank_processes import forked_ranks  # noqa: F401 - a fixture of this file
from runtime.test_ranks import CHECKPOINTS, FLAGS, SHORT, check_close, struck

MEGATRON = ("--trainer.kind", "megatron")
TWO = ("--num-processes", "2")
LAYERS = (*MEGATRON, *TWO, "--tensor-parallel", "2")
STAGES = (*MEGATRON, *TWO, "--pipeline-parallel", "2")
SHARES = (*MEGATRON, *TWO)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


def run(small, folder, *flags):
    done = strop("train", small.train, *FLAGS, "--run.folder", folder, *flags)
    assert done.code == 0, done.err
    return folder


@pytest.fixture(scope="module")
def runs(small, tmp_path_factory):
    """The same run by the trainer torch, and by Megatron-Core in one process and in two."""
    folder = tmp_path_factory.mktemp("runs")
    kinds = {"torch": (), "alone": MEGATRON, "layers": LAYERS, "stages": STAGES, "shares": SHARES}
    return {name: run(small, folder / name, *flags) for name, flags in kinds.items()}


@pytest.mark.parametrize("name", ["alone", "layers", "stages", "shares"])
def test_a_run_is_that_of_the_trainer_torch(runs, name):
    check_close(runs[name], runs["torch"])
    for step in range(1, 5):
        rows = [read_lines(runs[kind] / f"rollouts/step_{step:06d}.jsonl") for kind in (name, "torch")]
        assert [row["tokens"] for row in rows[0]] == [row["tokens"] for row in rows[1]]


def resumed(small, runs, tmp_path, then, *flags):
    folder = tmp_path / "run"
    shutil.copytree(runs[then], folder)
    return run(small, folder, *flags, "--resume", "step_000002")


@pytest.mark.parametrize(
    "name, flags", [("alone", MEGATRON), ("layers", LAYERS), ("stages", STAGES), ("shares", SHARES)]
)
def test_a_run_is_resumed_to_the_bit(small, runs, tmp_path, name, flags):
    folder = resumed(small, runs, tmp_path, name, *flags)
    assert metrics(folder) == metrics(runs[name])
    assert same_weights(folder / "model", runs[name] / "model")


@pytest.mark.parametrize("then, flags", [("layers", STAGES), ("stages", ()), ("torch", LAYERS), ("shares", MEGATRON)])
def test_a_run_goes_on_in_another_layout_or_with_the_other_trainer(small, runs, tmp_path, then, flags):
    check_close(resumed(small, runs, tmp_path, then, *flags), runs["torch"])


def test_a_teacher_is_listened_to_as_beside_the_trainer_torch(small, tmp_path):
    tiny_models.llama(3, vocab_size=11, pad_token_id=0, eos_token_id=1).save_pretrained(tmp_path / "teacher")
    for path in small.start.glob("token*"):
        shutil.copy(path, tmp_path / "teacher")
    flags = ("--distillation.teacher", tmp_path / "teacher")
    check_close(*(run(small, tmp_path / name, *kind, *flags) for name, kind in (("ours", STAGES), ("theirs", ()))))


def test_the_model_at_the_end_is_one_of_transformers(runs):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(runs["layers"] / "model")
    found = weights(runs["layers"] / "model")
    assert found.keys() == weights(runs["torch"] / "model").keys()
    assert torch.isfinite(model(input_ids=torch.tensor([[2, 3, 4]])).logits).all()


def test_a_step_is_redone_to_the_bit(runs):
    done = strop("replay", runs["stages"], "--step", "3")
    assert done.code == 0, done.err


def test_a_killed_process_ends_the_run_with_its_name_and_the_run_can_go_on(small, tmp_path):
    done, folder, seconds, flags = struck(
        small, tmp_path, signal.SIGKILL, *CHECKPOINTS, *MEGATRON, "--pipeline-parallel", "2"
    )
    pid = rank_processes.started[-1].pid
    assert done.code == 1
    assert f"rank 1 (process {pid}) of the trainer was killed by SIGKILL. The step was not made." in done.err
    assert seconds < 30
    again = strop("train", small.train, *SHORT, *flags, "--resume")
    assert again.code == 0, again.err
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3, 4]


def test_a_process_that_hangs_ends_the_run_within_the_limit(small, tmp_path):
    done, _, seconds, _ = struck(small, tmp_path, signal.SIGSTOP, *MEGATRON, "--process-timeout-s", "3")
    pid = rank_processes.started[-1].pid
    assert done.code == 1
    assert f"rank 1 (process {pid}) of the trainer did not answer within trainer.process_timeout_s = 3 s" in done.err
    assert seconds < 40


@pytest.mark.parametrize(
    "flags, reason",
    [
        (("--num-processes", "3", "--tensor-parallel", "3"), "trainer.tensor_parallel must divide num_attention_heads"),
        (
            ("--num-processes", "3", "--pipeline-parallel", "3"),
            "trainer.pipeline_parallel must divide num_hidden_layers",
        ),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(small, tmp_path, flags, reason):
    done = strop("train", small.train, *MEGATRON, *flags, "--run.folder", tmp_path / "run")
    assert (done.code, reason in done.err) == (2, True), done
    assert not (tmp_path / "run").exists()


def test_a_model_of_another_kind_is_refused(small, tmp_path):
    from transformers import AutoTokenizer

    tiny_models.sliding_mistral().save_pretrained(tmp_path / "mistral")
    config = tmp_path / "mistral" / "config.json"
    AutoTokenizer.from_pretrained(small.start).save_pretrained(tmp_path / "mistral")
    said = refusing(tmp_path)("train", small.train, *MEGATRON, "--model.path", config.parent)
    assert "trainer.kind must be torch for MistralForCausalLM, got megatron: it takes Llama, Qwen2 and Qwen3" in said
