"""Low-rank adapters: they alone learn, the reference is the model without them, and what is written is merged."""

import json
import shutil

import pytest
import tiny_models
import torch
from commands.small_runs import metrics, read_lines, same_weights, small_once, strop, weights
from made_batches import make_batch, make_objective, make_trainer, parameters, random_rows, saved_state
from safetensors.torch import load_file

from strop.config import TrainConfig, load_config
from strop.config.lora import LoraOptions
from strop.runtime.audit import audit
from strop.trainers import WholeWeights, attach_adapters, merged, save_adapters
from strop.types import UserError

pytest.importorskip("peft")
ROWS = random_rows(2, vocab=tiny_models.VOCAB)
_MATRICES = ("lora_A.default", "lora_B.default")
LORA = ("--lora.rank", "4", "--num-steps", "3", "--lr", "0.05", "--checkpoint-every-steps", "1", "--coef", "0.1")


def adapted(name="llama", *, dtype=torch.float32, **options):
    model = tiny_models.BUILDERS[name]().to(dtype)
    attach_adapters(model, LoraOptions(**{"rank": 4} | options), seed=3)
    return model


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora") / "run"
    done = strop("train", small.train, *LORA, "--keep-checkpoints", "9", "--run.folder", folder)
    assert done.code == 0, done.err
    return folder


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_only_adapters_move_and_they_begin_as_nothing(name):
    plain, model = tiny_models.BUILDERS[name](), adapted(name)
    batch = make_batch(*ROWS)
    assert torch.equal(make_trainer(model).logprobs(batch), make_trainer(plain).logprobs(batch))
    before = parameters(model)
    trainer = make_trainer(model, lr=0.05)
    trainer.step(batch, make_objective())
    moved = {name for name, value in parameters(model).items() if not torch.equal(value, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)


def test_the_reference_is_the_model_without_adapters_and_needs_no_copy():
    model, batch = adapted(), make_batch(*ROWS)
    began = make_trainer(tiny_models.llama()).logprobs(batch)
    trainer = make_trainer(model, lr=0.05, keeps_reference=True)
    for _ in range(2):
        trainer.step(batch, make_objective())
    assert torch.equal(trainer.logprobs(batch, model="reference"), began)
    assert (trainer.logprobs(batch) - began).abs().max() > 0.1
    trainer.step(batch, make_objective())  # and the adapters still learn
    assert all(p.requires_grad == ("lora_" in name) for name, p in model.named_parameters())


def test_the_merged_model_is_the_one_that_was_trained():
    model, batch = adapted(), make_batch(*ROWS)
    trainer = make_trainer(model, lr=0.05)
    trainer.step(batch, make_objective())
    whole = merged(model)
    assert parameters(whole).keys() == parameters(tiny_models.llama()).keys()
    torch.testing.assert_close(make_trainer(whole).logprobs(batch), trainer.logprobs(batch), rtol=1e-4, atol=1e-5)
    assert "lora" in repr(model)  # the trained one keeps its adapters


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks by an old name
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "tied_llama"])
def test_the_weights_for_an_engine_are_those_that_peft_merges_under_the_names_of_the_model(name, dtype, tmp_path):
    from peft import PeftModel

    model = adapted(name, dtype=dtype, alpha=12)
    trainer = make_trainer(model, lr=0.05)
    trainer.step(make_batch(*ROWS), make_objective())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = {name: w.detach().clone() for name, w in trainer.weights()}
    plain = dict(tiny_models.BUILDERS[name]().to(dtype).named_parameters())
    assert [(name, w.dtype, w.shape) for name, w in found.items()] == [(n, w.dtype, w.shape) for n, w in plain.items()]
    assert sum(not torch.equal(w, plain[name]) for name, w in found.items()) == sum("lora_A" in n for n in before)
    save_adapters(model, tmp_path)
    whole = PeftModel.from_pretrained(tiny_models.BUILDERS[name]().to(dtype), tmp_path).merge_and_unload()
    assert [name for name, w in whole.named_parameters() if not torch.equal(found[name], w)] == []
    assert [name for name, w in trainer.weights() if not torch.equal(found[name], w)] == []  # as often as asked for
    assert [name for name, w in model.named_parameters() if not torch.equal(before[name], w)] == []


def test_a_matrix_for_an_engine_is_base_plus_scaling_times_b_a():
    model = adapted(alpha=12)
    make_trainer(model, lr=0.05).step(make_batch(*ROWS), make_objective())
    name = "model.layers.1.mlp.up_proj"
    base, a, b = (model.get_parameter(f"{name}.{part}.weight") for part in ("base_layer", *_MATRICES))
    by_hand = base.double() + 12 / 4 * (b.double() @ a.double())
    torch.testing.assert_close(dict(WholeWeights(model))[f"{name}.weight"].double(), by_hand, rtol=0, atol=1e-6)


def test_adapters_of_a_bfloat16_model_learn_in_float32():
    model = adapted(dtype=torch.bfloat16)
    before = parameters(model)
    make_trainer(model, lr=1e-5).step(make_batch(*ROWS), make_objective())
    learned = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all(before[name].dtype == torch.float32 for name in learned)
    assert any(not torch.equal(before[name], dict(model.named_parameters())[name]) for name in learned)


def test_a_checkpoint_holds_adapters_alone(tmp_path):
    trainer = make_trainer(adapted(), lr=0.05, keeps_reference=True)
    trainer.step(make_batch(*ROWS), make_objective())
    files = saved_state(trainer, tmp_path / "state")
    assert set(files) == {"weights.safetensors", "optimizer.safetensors", "trainer.json"}
    assert all("lora_" in name for name in load_file(tmp_path / "state/weights.safetensors"))


def test_a_layer_that_is_not_there_is_refused_in_one_sentence():
    with pytest.raises(UserError, match=r"lora\.target_modules must fit LlamaForCausalLM, got \['no_such'\]"):
        adapted(target_modules=("no_such",))


def test_a_run_writes_the_merged_model_and_the_adapters_beside_it(small, run):
    began, ended = weights(small.start), weights(run / "model")
    assert began.keys() == ended.keys()
    assert any(not torch.equal(began[name], ended[name]) for name in began)
    assert torch.equal(began["model.embed_tokens.weight"], ended["model.embed_tokens.weight"])  # has no adapter


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks by an old name
def test_peft_reads_the_adapters_of_a_run_and_merges_them_into_the_same_model(small, run):
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    own = LlamaForCausalLM.from_pretrained(small.start)
    whole = PeftModel.from_pretrained(own, run / "adapter").merge_and_unload()
    for name, weight in weights(run / "model").items():
        torch.testing.assert_close(whole.state_dict()[name], weight, rtol=1e-6, atol=1e-7)


def test_the_sampler_and_the_trainer_of_a_run_with_adapters_agree_and_its_reference_stays(run):
    rows = metrics(run)
    assert max(row["logprob_gap"] for row in rows) < 1e-4
    assert rows[-1]["kl_ref_k3"] > 1e-4


def test_a_run_with_adapters_resumes_bit_for_bit(small, run, tmp_path):
    folder = tmp_path / "run"
    flags = [*LORA]
    flags[3] = "1"
    assert strop("train", small.train, *flags, "--run.folder", folder).code == 0
    done = strop("train", small.train, *LORA, "--resume", "--run.folder", folder)
    assert done.code == 0, done.err
    assert same_weights(folder / "model", run / "model")
    assert metrics(folder) == metrics(run)


@pytest.fixture
def moved(small, run, tmp_path):
    """The run, with another model in the place that it began from."""
    folder, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(run, folder)
    shutil.copytree(run / "model", other)
    text = (folder / "config.toml").read_text()
    assert str(small.start) in text
    (folder / "config.toml").write_text(text.replace(str(small.start), str(other)))
    return folder, other


def test_adapters_do_not_go_on_from_another_model(small, moved):
    folder, other = moved
    done = strop("train", small.train, *LORA, "--model.path", other, "--resume", "--run.folder", folder)
    assert done.code == 2
    assert "model.path must be the model whose adapters" in done.err


@pytest.mark.parametrize("option, value", [("lora.rank", "2"), ("lora.target_modules", "['q_proj']")])
def test_other_weights_do_not_learn_in_a_run_that_is_resumed_even_if_that_is_confirmed(
    small, run, tmp_path, option, value
):
    folder = shutil.copytree(run, tmp_path / "run")
    rest = (*LORA[2:], "--resume", "step_000002", "--allow-change", "lora", "--run.folder", folder)
    changed = {"lora.rank": "4", option: value}
    done = strop("train", small.train, *(word for name, now in changed.items() for word in (f"--{name}", now)), *rest)
    assert done.code == 2
    assert f"{option} must be " in done.err
    assert "Set it back, or start a new run" in done.err
    done = strop("train", small.train, "--lora.rank", "4", "--lora.alpha", "16", *rest)
    assert done.code == 0, done.err


# ---- adapters beside what goes on around training --------------------------------------------------------------------


def test_a_snapshot_of_adapters_is_of_when_it_was_taken(tmp_path):
    trainer = make_trainer(adapted(), lr=0.05, keeps_reference=True)
    trainer.step(make_batch(*ROWS), make_objective())
    before, write = parameters(trainer.model), trainer.snapshot()
    trainer.step(make_batch(*ROWS), make_objective())
    write(tmp_path)
    assert all(weight.equal(before[name]) for name, weight in load_file(tmp_path / "weights.safetensors").items())


@pytest.mark.parametrize("step", [1, 3])
def test_a_step_with_adapters_is_replayed_bit_for_bit(run, step):
    done = strop("replay", run, "--step", step)
    assert (done.code, done.out.splitlines()[-1]) == (0, "identical"), done


def test_a_replay_tells_another_model_below_the_same_adapters(moved):
    at_start = strop("replay", moved[0], "--step", "1")
    assert "the weights of the policy had checksum" in at_start.err, at_start
    later = strop("replay", moved[0], "--step", "3")
    assert later.code == 2
    assert "model.path must be the model whose adapters" in later.err


def test_a_run_with_adapters_goes_back_to_its_checkpoint(small, tmp_path):
    (tmp_path / "scores.py").write_text(
        "def score(rollout):\n    return 1e68 if rollout.group_id >= 8 and rollout.sample == 1 else len(set(rollout.text))\n"
    )
    flags = (
        "--normalize-std",
        "false",
        "--on-non-finite",
        "rollback",
        "--reward.function",
        f"{tmp_path}/scores.py:score",
    )
    done = strop("train", small.train, *LORA, *flags, "--run.folder", tmp_path / "run")
    assert done.code == 0, done.err
    assert f"step 3 took the run back to {tmp_path}/run/checkpoints/step_000002" in done.out
    of_step = {row["step"]: row["policy"] for row in read_lines(tmp_path / "run/rollouts/weights.jsonl")}
    assert of_step[3] == of_step[2] != of_step[1]


def test_strop_eval_of_a_run_with_adapters_samples_from_the_merged_model(small, run):
    of_run, of_model = (
        json.loads(strop("eval", *what, *small.eval_flags, "--num-samples", "4", "--json").out)
        for what in ((run,), (small.train, "--model.path", run / "model"))
    )
    assert of_run["sampled"] == of_model["sampled"]


def test_strop_sft_learns_adapters_too(small, tmp_path):
    assert strop("sft", small.sft, "--lora.rank", "2", "--run.folder", tmp_path / "run").code == 0
    assert (tmp_path / "run/adapter/adapter_model.safetensors").exists()
    assert not same_weights(tmp_path / "run/model", small.start)


def test_a_reference_that_is_to_become_the_policy_is_refused_beside_adapters(small, tmp_path):
    done = strop("train", small.train, *LORA, "--refresh-steps", "2", "--run.folder", tmp_path / "run")
    assert done.code == 2
    assert "algorithm.kl.refresh_steps must be 0 with lora.rank, got 2" in done.err


def test_every_option_of_adapters_acts(small):
    config = load_config(small.train, {"lora.rank": 4})
    assert isinstance(config, TrainConfig)
    found = {finding.path: finding.verdict for finding in audit(config, only="lora")}
    assert found == {"lora.rank": "acts", "lora.alpha": "acts", "lora.target_modules": "acts"}
