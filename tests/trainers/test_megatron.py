"""The trainer megatron: which models it takes, where it is refused, and one process of it, in a process of its own."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiny_models
import torch
from commands.small_runs import refusing, small_once

from strop.config import MegatronTrainerOptions
from strop.trainers.megatron.environment import check_device
from strop.trainers.megatron.shape import Shape
from strop.types import UserError

ROOT = Path(__file__).parents[2]
has_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


@has_megatron
def test_one_process_computes_what_the_trainer_torch_does():
    """Loss, gradients, weights and log-probabilities of five steps, with Megatron-Core itself behind a shim."""
    command = [sys.executable, "-m", "pytest", "-q", "tests/real_megatron/test_one_process.py", "--megatron"]
    done = subprocess.run([*command, "-p", "no:cacheprovider"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.fixture
def refused(tmp_path_factory, tmp_path):
    small = small_once(tmp_path_factory)
    return lambda *flags: refusing(tmp_path)("train", small.train, "--trainer.kind", "megatron", *flags)


@pytest.fixture
def loads_nothing(monkeypatch):
    def load(*args, **more):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("strop.runtime.session.load_model", load)


def test_without_the_extra_it_is_refused_before_a_model_is_loaded(refused, loads_nothing, monkeypatch):
    monkeypatch.setattr("strop.trainers.megatron.environment.find_spec", lambda name: None)
    said = refused()
    assert "needs the package megatron-core, which is not installed. pip install 'strop[megatron]'." in said


@has_megatron
def test_without_a_gpu_it_is_refused_before_a_model_is_loaded(refused, loads_nothing):
    said = refused("--model.device", "cpu")
    assert "trainer.kind must be torch where model.device is cpu, got megatron: Megatron-Core computes on CUDA" in said


def test_only_cuda_is_taken():
    check_device(torch.device("cuda"))
    with pytest.raises(UserError, match=r"where model\.device is cpu"):
        check_device(torch.device("cpu"))


@pytest.mark.parametrize(
    "flags, reason",
    [
        (("--lora.rank", "2"), "lora.rank must be none with trainer.kind = megatron, got 2"),
        (
            ("--algorithm.advantage.kind", "gae"),
            "trainer.kind must be torch with algorithm.advantage.kind = gae, got megatron",
        ),
        (("--model.device", "cuda:1"), "model.device must be auto, cuda or cpu with trainer.kind = megatron"),
        (
            ("--num-processes", "4", "--tensor-parallel", "2", "--pipeline-parallel", "4"),
            "trainer.pipeline_parallel must, times trainer.tensor_parallel = 2, divide trainer.num_processes = 4, got 4",
        ),
        (("--tensor-parallel", "2"), "trainer.tensor_parallel must divide trainer.num_processes = 1, got 2"),
        (("--distributed-optimizer", "false"), "trainer.distributed_optimizer = False is only used when"),
        (("--layout", "packed"), 'layout belongs to kind = "torch"; has none: its rows are padded'),
        (("--context-parallel", "2"), 'context_parallel belongs to kind = "torch"; has none'),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_it_cannot_do_is_refused(refused, flags, reason):
    assert reason in refused(*flags)


def test_fine_tuning_has_the_trainer_torch_alone(tmp_path_factory, tmp_path):
    said = refusing(tmp_path)("sft", small_once(tmp_path_factory).sft, "--trainer.kind", "megatron")
    assert "trainer.kind must be one of torch, got 'megatron'" in said


@pytest.mark.parametrize(
    "name, reason",
    [
        ("sliding_mistral", "it takes Llama, Qwen2 and Qwen3, dense ones, and not mistral"),
        ("gemma2", "and not gemma2"),
        ("gpt2", "and not gpt2"),
    ],
)
def test_a_model_of_another_kind_is_refused(name, reason):
    with pytest.raises(UserError) as error:
        Shape.of(getattr(tiny_models, name)())
    assert str(error.value).startswith("trainer.kind must be torch for ")
    assert reason in str(error.value)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"attention_bias": True}, "its weights are not those of its kind: model.layers.0.self_attn.k_proj.bias"),
        ({"mlp_bias": True}, "its weights are not those of its kind: model.layers.0.mlp.down_proj.bias"),
        ({"hidden_act": "gelu"}, "its MLP has gelu, not silu"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0}},
            "its rotary positions are of the kind yarn, not default, linear, llama3",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_llama_that_its_layers_do_not_compute_is_refused(changes, reason):
    with pytest.raises(UserError, match=reason):
        Shape.of(tiny_models.llama(**changes))


def test_a_model_with_windows_is_refused():
    model = tiny_models.qwen2()
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(UserError, match="attend to a window of tokens alone"):
        Shape.of(model)


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"tensor_parallel": 4}, "trainer.tensor_parallel must divide num_key_value_heads of the model, 2, got 4"),
        ({"tensor_parallel": 3}, "trainer.tensor_parallel must divide num_attention_heads of the model, 4, got 3"),
        ({"pipeline_parallel": 3}, "trainer.pipeline_parallel must divide num_hidden_layers of the model, 2, got 3"),
    ],
)
def test_a_model_that_processes_do_not_divide_is_refused(options, reason):
    shape = Shape.of(tiny_models.llama())
    with pytest.raises(UserError, match=reason):
        shape.check_divides(MegatronTrainerOptions(num_processes=12, **options))


def test_a_vocabulary_is_filled_up_to_what_processes_divide():
    shape = Shape.of(tiny_models.llama())
    assert [shape.padded_vocab_size(n) for n in (1, 2, 3, 4)] == [37, 38, 39, 40]
