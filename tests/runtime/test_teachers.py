"""Distillation through strop train: teachers by source, what they teach, what is refused, and resume."""

import json
import shutil

import pytest
import torch
from commands.small_runs import metrics, refusing, same_weights, small_once, strop
from safetensors.torch import load_file, save_file
from trainers.made_batches import make_rollout
from transformers import AutoModelForCausalLM

from strop.config import DistillationOptions
from strop.data import build_batch
from strop.observe.console import QuietConsole
from strop.runtime.audit.teacher_server import TeacherModel, serving
from strop.runtime.teachers import Teachers
from strop.types import GuardError

ALONE = ("--distillation.alone", "--updates-per-batch", "1", "--distillation.teacher")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.fixture(scope="module")
def teachers(small, tmp_path_factory):
    """Two models of the small one's shape: one that has learned from demonstrations, one with noise in its weights."""
    folder = tmp_path_factory.mktemp("teachers")
    assert strop("sft", small.sft, "--num-steps", "30", "--run.folder", folder / "sft").code == 0
    shutil.copytree(small.start, folder / "noisy")
    weights = load_file(small.start / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    noisy = {name: w + 0.1 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
    save_file(noisy, folder / "noisy/model.safetensors", metadata={"format": "pt"})
    return {"learned": folder / "sft/model", "noisy": folder / "noisy"}


@pytest.fixture
def refused(small, tmp_path):
    run = refusing(tmp_path)
    return lambda *flags, config=small.train: run("train", config, *flags)


def train(small, folder, *flags, config=None):
    done = strop("train", config or small.train, *flags, "--run.folder", folder)
    assert done.code == 0, done.err
    return folder


# ---- what is learned ------------------------------------------------------------------------------------------------


def test_the_student_comes_nearer_to_its_teacher(small, teachers, tmp_path):
    rows = metrics(train(small, tmp_path / "run", *ALONE, teachers["learned"], "--num-steps", "20"))
    assert sum(row["reverse_kl"] for row in rows[-5:]) < 0.7 * sum(row["reverse_kl"] for row in rows[:5])


def test_the_measured_kl_is_the_mean_of_log_ratios_of_two_models_computed_apart(small, teachers, tmp_path):
    """Of the run's own rollouts, by the models themselves, one sequence at a time, at the sampling temperature."""
    flags = ("--rollout.temperature", "0.7", "--num-steps", "1")
    run = train(small, tmp_path / "run", *ALONE, teachers["noisy"], *flags)
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (small.start, teachers["noisy"])]
    distances = []
    for line in (run / "rollouts/step_000001.jsonl").read_text().splitlines():
        row = json.loads(line)
        with torch.no_grad():
            student, teacher = ((m(torch.tensor([row["tokens"]])).logits[0] / 0.7).log_softmax(-1) for m in models)
        first = len(row["tokens"]) - row["num_response_tokens"]
        for place in range(first, len(row["tokens"])):
            distances.append(float((student - teacher)[place - 1, row["tokens"][place]]))
    assert metrics(run)[0]["reverse_kl"] == pytest.approx(sum(distances) / len(distances), abs=1e-5)


def test_alone_the_loss_of_the_first_update_is_the_kl(small, teachers, tmp_path):
    """Every ratio is 1: the mean over tokens of -A_t = -(teacher - student)."""
    (row,) = metrics(train(small, tmp_path / "run", *ALONE, teachers["noisy"], "--num-steps", "1"))
    assert row["loss"] == pytest.approx(row["reverse_kl"], rel=1e-5)


def test_beside_rewards_the_signal_is_added_after_whitening(small, teachers, tmp_path):
    """Whitened advantages have mean 0 over the tokens, so that the loss of the only update is what the teacher added."""
    flags = ("--num-steps", "1", "--updates-per-batch", "1", "--distillation.teacher", teachers["noisy"])
    (row,) = metrics(train(small, tmp_path / "run", *flags, "--whiten-advantages", "--teacher-coef", "0.5"))
    assert row["loss"] == pytest.approx(0.5 * row["reverse_kl"], rel=1e-4)


def test_a_teacher_that_is_the_student_teaches_nothing_and_rewards_are_learned_as_without(small, tmp_path):
    flags = ("--num-steps", "1", "--updates-per-batch", "1")
    with_teacher = train(small, tmp_path / "with", *flags, "--distillation.teacher", small.start)
    without = train(small, tmp_path / "without", *flags)
    assert metrics(with_teacher)[0]["reverse_kl"] == 0
    assert same_weights(with_teacher / "model", without / "model")


def test_alone_rewards_are_measured_and_change_nothing(small, teachers, tmp_path):
    runs = [
        train(small, tmp_path / name, *ALONE, teachers["learned"], "--reward.function", small.reward(name))
        for name in ("score", "equal")
    ]
    assert same_weights(runs[0] / "model", runs[1] / "model")
    assert metrics(runs[1])[0]["reward"] == pytest.approx(0.35)


@pytest.fixture
def unscored(small, tmp_path):
    """The config without a reward."""
    text = small.train.read_text().replace(f'kind = "function"\nfunction = "{small.reward("score")}"', 'kind = "none"')
    (tmp_path / "unscored.toml").write_text(text)
    return tmp_path / "unscored.toml"


def test_alone_no_reward_is_needed_and_none_is_reported(small, teachers, unscored, tmp_path):
    flags = (*ALONE, teachers["learned"])
    run = train(small, tmp_path / "run", *flags, "--group-size", "1", config=unscored)
    assert [name for name in metrics(run)[0] if "reward" in name or "group" in name] == []
    scored = train(small, tmp_path / "scored", *flags, "--group-size", "1")
    assert same_weights(run / "model", scored / "model")


# ---- several teachers -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources(small, tmp_path_factory):
    """The prompts with a source: those of even length are a, the others b."""
    path = tmp_path_factory.mktemp("sources") / "train.jsonl"
    rows = [json.loads(line) for line in (small.folder / "train.jsonl").read_text().splitlines()[:64]]
    marked = [row | {"source": "ab"[i % 2]} for i, row in enumerate(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in marked))
    return ("--data.path", path)


def test_each_source_has_its_teacher_and_a_metric(small, teachers, sources, tmp_path):
    flags = ("--distillation.alone", *sources, "--num-steps", "1", "--distillation.teachers.a", teachers["noisy"])
    (row,) = metrics(train(small, tmp_path / "run", *flags, "--distillation.teacher", small.start))
    assert row["reverse_kl/of/b"] == pytest.approx(0, abs=1e-6)  # the student itself, in other micro-batches
    assert abs(row["reverse_kl/of/a"]) > 0.01


def test_a_teacher_of_several_sources_is_loaded_once(small, teachers, sources, tmp_path, monkeypatch):
    from strop.runtime import teachers as module

    loaded, load = [], module.load_model
    monkeypatch.setattr(module, "load_model", lambda o, **named: loaded.append(o.path) or load(o, **named))
    named = [f"--distillation.teachers.{s}={teachers['learned']}" for s in "ab"]
    train(small, tmp_path / "run", *sources, *named, "--num-steps", "1")
    assert loaded == [str(teachers["learned"])]


@pytest.mark.parametrize(
    "flags, says",
    [
        (("--distillation.teachers.c", "T"), "distillation.teachers.c must be named for a source of the data"),
        (("--distillation.teachers.a", "T"), "prompt row 1 has source b. Name one for it"),
        (
            ("--distillation.teachers.a=T", "--distillation.teachers.b=T", "--distillation.teacher=T"),
            "distillation.teacher = T must have a prompt to teach",
        ),
    ],
)
def test_sources_and_teachers_must_fit(refused, sources, flags, says):
    assert says in refused(*sources, *flags)


# ---- a server -------------------------------------------------------------------------------------------------------


def test_a_server_teaches_what_the_same_model_teaches_in_this_process(small, teachers, tmp_path):
    flags = ("--num-steps", "1", "--distillation.alone", "--updates-per-batch", "1")
    with serving(TeacherModel(teachers["noisy"])) as address:
        (there,) = metrics(train(small, tmp_path / "there", *flags, "--distillation.teacher", address))
    (here,) = metrics(train(small, tmp_path / "here", *flags, "--distillation.teacher", teachers["noisy"]))
    assert there["reverse_kl"] == pytest.approx(here["reverse_kl"], abs=1e-5)
    assert there["grad_norm"] == pytest.approx(here["grad_norm"], rel=1e-4)


def test_a_server_with_another_vocabulary_is_refused_with_the_first_token_that_differs(small, refused):
    model = TeacherModel(small.start)

    def other(path, body):
        answer = model(path, body)
        return {"prompt": answer["prompt"].replace("c", "?")} if path == "/detokenize" else answer

    with serving(other) as address:
        message = refused("--distillation.teacher", address)
    assert f"distillation.teacher = {address} must have the vocabulary of the model; token id" in message
    assert "is 'c' for the model and '?' for the teacher" in message


def test_prompts_that_do_not_fit_the_server_are_refused(small, refused):
    model = TeacherModel(small.start)
    short = {"data": [{"id": "short", "max_model_len": 9}]}
    with serving(lambda path, body: short if path == "/v1/models" else model(path, body)) as address:
        assert "does not fit the server's 9 positions" in refused("--distillation.teacher", address)


# ---- what is refused ------------------------------------------------------------------------------------------------


def changed(start, folder, edit):
    """A copy of a model folder with one of its JSON files edited."""
    shutil.copytree(start, folder)
    edit(folder)
    return folder


def swap_letters(folder):
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())
    vocabulary = values["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(values))


def test_a_vocabulary_that_differs_is_refused_with_its_first_tokens(small, refused, tmp_path):
    other = changed(small.start, tmp_path / "other", swap_letters)
    message = refused("--distillation.teacher", other)
    assert (
        f"distillation.teacher = {str(other)!r} must have the vocabulary of the model; these token ids differ"
        in message
    )
    assert "('a', teacher: 'b'), " in message
    assert "('b', teacher: 'a')." in message


def end_elsewhere(folder):
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {"eos_token_id": 5}))
    values = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in values.items() if k != "eos_token"}))


def test_a_teacher_that_never_ends_as_the_student_does_is_refused(small, refused, tmp_path):
    other = changed(small.start, tmp_path / "other", end_elsewhere)
    message = refused("--distillation.teacher", other)
    assert "must end responses as the model does, with token 1; it ends them with 5" in message


@pytest.mark.parametrize(
    "flags, says",
    [
        (("--distillation.teacher", "no/such/folder"), "distillation.teacher must be a Hugging Face folder or name"),
        (("--distillation.teacher", "T", "--teacher-device", "moon"), "distillation.teacher_device must be a device"),
    ],
)
def test_a_teacher_that_cannot_be_had_is_named_by_its_option(small, refused, flags, says):
    assert says in refused(*(str(small.start) if flag == "T" else flag for flag in flags))


def test_a_token_that_is_impossible_to_the_teacher_stops_the_step():
    class Impossible:
        def logprobs(self, batch, *, temperature, advance):
            return torch.where(batch.tokens == 7, -torch.inf, -1.0)

    batch = build_batch([make_rollout([7, 3], [4, 7], row=2)], [0.0])
    batch = batch.__class__(**{**vars(batch), "old_logprobs": torch.zeros(4)})
    options = DistillationOptions(teacher="t")
    teachers = Teachers(options, {"t": Impossible()}, temperature=1.0)
    with pytest.raises(GuardError, match=r"got -inf for token id 7 of sample 0 of prompt row 2 \(1 such"):
        teachers.advantages(batch, [None], QuietConsole())


# ---- resume ---------------------------------------------------------------------------------------------------------

CHECKPOINTS = ("--checkpoint-every-steps", "1", "--keep-checkpoints", "9")


def test_some_steps_then_resuming_equals_all_steps_at_once_wherever_the_teacher_lies_by_then(
    small, teachers, sources, tmp_path
):
    flags = (*sources, *CHECKPOINTS, "--teacher-gamma", "0.5", "--distillation.teachers.a", teachers["noisy"])
    whole = train(small, tmp_path / "whole", *flags, "--distillation.teacher", teachers["learned"])
    part = tmp_path / "part"
    train(small, part, *flags, "--distillation.teacher", teachers["learned"], "--num-steps", "1")
    shutil.copytree(teachers["learned"], tmp_path / "moved")
    train(small, part, *flags, "--distillation.teacher", tmp_path / "moved", "--resume")
    assert same_weights(part / "model", whole / "model")
    assert metrics(part) == metrics(whole)


def test_resuming_with_another_teacher_is_refused(small, teachers, tmp_path):
    run = train(small, tmp_path / "run", *CHECKPOINTS, *ALONE, teachers["learned"], "--num-steps", "1")
    for flags in ((teachers["noisy"],), (teachers["learned"], "--teacher-dtype", "bfloat16")):
        done = strop("train", small.train, *CHECKPOINTS, *ALONE, *flags, "--run.folder", run, "--resume")
        assert done.code == 2
        assert "distillation.teacher must be the teacher that" in done.err


def test_resuming_with_another_weight_of_the_signal_is_refused(small, teachers, tmp_path):
    run = train(small, tmp_path / "run", *CHECKPOINTS, *ALONE, teachers["learned"], "--num-steps", "1")
    flags = (*CHECKPOINTS, *ALONE, teachers["learned"], "--teacher-coef", "2")
    done = strop("train", small.train, *flags, "--run.folder", run, "--resume")
    assert "distillation.teacher_coef must be 1.0 as in the run that is resumed, got 2.0" in done.err
