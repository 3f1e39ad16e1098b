"""PPO through whole runs of the command: resume, the critic's folder, batches in which only the critic learns, bad input."""

import json
import shutil

import pytest
from commands.small_runs import metrics, refusing, same_weights, small_once, strop, write_model, write_tokenizer
from safetensors.torch import load_file

FLAGS = ("--preset", "ppo", "--num-steps", "4", "--critic.lr", "0.02", "--critic.lr_schedule", "cosine")
FLAGS = (*FLAGS, "--critic.warmup_steps", "1", "--only-first-steps", "1")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    """A run of four steps with a checkpoint after each, the policy learning from the second on."""
    run = tmp_path_factory.mktemp("ppo") / "run"
    done = strop("train", small.train, *FLAGS, *CHECKPOINTS, "--run.folder", run)
    assert done.code == 0, done.err
    return run


CHECKPOINTS = ("--checkpoint-every-steps", "1", "--keep-checkpoints", "9")


def same_critic(one, other):
    """Body and head, bit for bit."""
    files = [[load_file(run / "critic" / name) for name in CRITIC_FILES] for run in (one, other)]
    return all(a.keys() == b.keys() and all(a[n].equal(b[n]) for n in a) for a, b in zip(*files, strict=True))


CRITIC_FILES = ("model.safetensors", "value_head.safetensors")


@pytest.mark.parametrize("step", [1, 3])
def test_some_steps_then_resuming_equals_all_steps_at_once_with_a_critic(small, whole, tmp_path, step):
    """Once from where only the critic has learned, and once from where both have."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for name in ("model", "critic"):
        shutil.rmtree(run / name)
    for later in range(step + 1, 5):
        shutil.rmtree(run / f"checkpoints/step_{later:06d}")
    done = strop("train", small.train, *FLAGS, *CHECKPOINTS, "--run.folder", run, "--resume")
    assert done.code == 0, done.err
    assert same_weights(run / "model", whole / "model")
    assert same_critic(run, whole)
    assert metrics(run) == metrics(whole)
    names = sorted(path.name for path in (whole / "checkpoints/step_000004").iterdir())
    assert [name for name in names if name.startswith("critic_")] == [
        "critic_optimizer.safetensors",
        "critic_trainer.json",
        "critic_weights.safetensors",
    ]
    for name in names:
        one, other = (folder / "checkpoints/step_000004" / name for folder in (run, whole))
        assert one.read_bytes() == other.read_bytes(), name


def test_in_the_first_steps_only_the_critic_learns(small, whole):
    first, second = metrics(whole)[:2]
    assert {"value_loss", "value_clip_fraction", "explained_variance", "critic_lr", "critic_grad_norm"} <= first.keys()
    assert not {"loss", "lr", "grad_norm"} & first.keys()
    assert {"loss", "lr", "grad_norm", "value_loss"} <= second.keys()
    state = json.loads((whole / "checkpoints/step_000001/trainer.json").read_text())
    critic = json.loads((whole / "checkpoints/step_000001/critic_trainer.json").read_text())
    assert (state["num_steps"], critic["num_steps"]) == (0, 2)  # two updates of a batch
    weights = load_file(whole / "checkpoints/step_000001/weights.safetensors")
    start = load_file(small.start / "model.safetensors")
    assert all(weights[name].equal(start[name]) for name in start)


def test_the_policys_schedule_is_as_long_as_what_it_learns(small, tmp_path):
    """Case 4: four batches, one of them the critic's alone, two updates each: the policy makes six steps, the critic eight."""
    flags = ("--lr-schedule", "linear", "--lr", "0.06", "--critic.lr_schedule", "linear", "--critic.lr", "0.08")
    steps = ("--preset", "ppo", "--num-steps", "4", "--only-first-steps", "1")
    done = strop("train", small.train, *steps, *flags, "--run.folder", tmp_path / "run")
    assert done.code == 0, done.err
    assert "-> 6 optimizer steps in 4 batches; in the first 1 only the critic learns" in done.out
    rows = metrics(tmp_path / "run")
    assert [row.get("lr") for row in rows] == [None, *map(pytest.approx, (0.06, 0.04, 0.02))]  # the larger of two
    assert [row["critic_lr"] for row in rows] == list(map(pytest.approx, (0.08, 0.06, 0.04, 0.02)))


def test_a_run_begins_from_the_critic_of_another(small, whole, tmp_path):
    """What that one foresaw, this one foresees in its first batch; a new head says 0, whose clip fraction is another."""
    flags = ("--preset", "ppo", "--num-steps", "1", "--model.path", whole / "model", "--critic.path", whole / "critic")
    done = strop("train", small.train, *flags, "--run.folder", tmp_path / "given")
    assert done.code == 0, done.err
    fresh = strop("train", small.train, *flags[:-2], "--run.folder", tmp_path / "fresh")
    assert fresh.code == 0, fresh.err
    found, new = (metrics(tmp_path / name)[0]["explained_variance"] for name in ("given", "fresh"))
    assert new == 0
    assert found != 0


def test_a_critic_may_begin_from_any_language_model_with_the_same_tokens(small, tmp_path):
    """One of another width, with a new head."""
    other = tmp_path / "other"
    shutil.copytree(small.start, other)
    config = json.loads((other / "config.json").read_text())
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**config | {"hidden_size": 16, "intermediate_size": 32})).save_pretrained(other)
    flags = ("--preset", "ppo", "--num-steps", "1", "--critic.path", other)
    done = strop("train", small.train, *flags, "--run.folder", tmp_path / "run")
    assert done.code == 0, done.err
    assert load_file(tmp_path / "run/critic/value_head.safetensors")["weight"].shape == (1, 16)
    assert f"critic.path = '{other}' has no value_head.safetensors: a critic that begins with it begins by" in done.out


def test_loading_a_language_model_as_a_critic_is_quiet(small, tmp_path, caplog):
    """transformers reports weights that nobody takes, such as those of a head of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM, logging

    config = json.loads((small.start / "config.json").read_text()) | {"tie_word_embeddings": False}
    shutil.copytree(small.start, tmp_path / "other")
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(tmp_path / "other")
    flags = ("--preset", "ppo", "--num-steps", "2", "--only-first-steps", "1", "--critic.path", tmp_path / "other")
    logging.enable_propagation()
    try:
        done = strop("train", small.train, *flags, "--run.folder", tmp_path / "run")
    finally:
        logging.disable_propagation()
    assert done.code == 0, done.err
    assert "LOAD REPORT" not in caplog.text
    alone, both = [line for line in done.out.splitlines() if line.startswith("step ")]
    assert "  loss " not in alone
    assert all(label in line for line in (alone, both) for label in ("  vloss ", "  vgrad "))


def test_resuming_with_a_critic_of_another_shape_names_the_option(small, whole, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = json.loads((small.start / "config.json").read_text())
    shutil.copytree(small.start, tmp_path / "other")
    LlamaForCausalLM(LlamaConfig(**config | {"intermediate_size": 48})).save_pretrained(tmp_path / "other")
    shutil.copytree(whole, tmp_path / "run")
    flags = (*FLAGS, *CHECKPOINTS, "--run.folder", tmp_path / "run", "--resume", "--critic.path", tmp_path / "other")
    done = strop("train", small.train, *flags)
    assert done.code == 2
    held = tmp_path / "run/checkpoints/step_000004"
    assert f"critic.path must give a critic of the shape that {held} holds, got '{tmp_path / 'other'}'." in done.err
    assert "(64, 32) for (48, 32)" in done.err
    assert same_weights(tmp_path / "run/model", whole / "model")


def test_a_critic_that_does_not_read_the_policys_tokens_is_refused(small, tmp_path):
    write_model(tmp_path / "other", vocab_size=write_tokenizer(tmp_path / "other", "xyz"))
    message = refusing(tmp_path)("train", small.train, "--preset", "ppo", "--critic.path", tmp_path / "other")
    assert "critic.path =" in message
    assert "must be a model with the policy's tokens" in message


def test_a_critic_folder_that_is_not_there_is_refused(small, tmp_path):
    message = refusing(tmp_path)("train", small.train, "--preset", "ppo", "--critic.path", "./nowhere")
    assert "critic.path must be a Hugging Face folder or name, got './nowhere': there is no such folder." in message


@pytest.mark.parametrize("damage", ["broken", "foreign"])
def test_a_value_head_that_is_none_is_refused(small, whole, tmp_path, damage):
    critic = tmp_path / "critic"
    shutil.copytree(whole / "critic", critic)
    head = critic / "value_head.safetensors"
    if damage == "broken":
        head.write_bytes(head.read_bytes()[:-5])
    else:
        shutil.copy(critic / "model.safetensors", head)
    message = refusing(tmp_path)("train", small.train, "--preset", "ppo", "--critic.path", critic)
    assert "value_head.safetensors is no value head of this model" in message


@pytest.mark.parametrize("option", ["model.path", "distillation.teacher"])
def test_a_critic_is_no_language_model(small, whole, tmp_path, option):
    """Its embedding would be taken for the head that it lacks."""
    message = refusing(tmp_path)("train", small.train, f"--{option}", whole / "critic")
    assert f"{option} must be a language model, got '{whole / 'critic'}': it is a critic" in message


def test_options_of_a_critic_that_is_not_there_are_refused(small, tmp_path):
    message = refusing(tmp_path)("train", small.train, "--critic.lr", "0.1")
    assert "critic.lr = 0.1 is only used when algorithm.advantage.kind = gae" in message


def test_a_run_in_which_the_policy_never_learns_is_refused(small, tmp_path):
    message = refusing(tmp_path)("train", small.train, "--preset", "ppo", "--only-first-steps", "3")
    assert "critic.only_first_steps must be below run.num_steps, got 3 and 3" in message


def test_a_warmup_that_the_policys_steps_cannot_hold_is_refused(small, tmp_path):
    """Three batches of two updates, two of them the critic's alone: two steps of the policy."""
    flags = ("--preset", "ppo", "--only-first-steps", "2", "--trainer.warmup_steps", "2")
    message = refusing(tmp_path)("train", small.train, *flags)
    product = "(run.num_steps = 3 - critic.only_first_steps = 2) x algorithm.updates_per_batch = 2"
    assert f"trainer.warmup_steps must be below the run's 2 optimizer steps ({product}), got 2" in message


def test_a_replaced_run_without_a_critic_keeps_none_of_the_earlier_one(small, tmp_path):
    run = tmp_path / "run"
    assert strop("train", small.train, "--preset", "ppo", "--num-steps", "1", "--run.folder", run).code == 0
    assert (run / "critic/value_head.safetensors").exists()
    assert strop("train", small.train, "--num-steps", "1", "--run.folder", run, "--overwrite").code == 0
    assert not (run / "critic").exists()


def test_groups_of_one_are_enough_for_a_critic(small, tmp_path):
    flags = ("--preset", "ppo", "--num-steps", "1", "--group-size", "1")
    done = strop("train", small.train, *flags, "--run.folder", tmp_path / "run")
    assert done.code == 0, done.err
    assert "groups_of_one" not in metrics(tmp_path / "run")[0]
