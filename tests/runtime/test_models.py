"""A model folder is loaded whole or refused in one sentence; end tokens and threads are what the model and machine have."""

import json
import os

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from strop.config import ModelOptions
from strop.runtime.models import check_stop_token_ids, choose_device, load_model, set_threads
from strop.types import ModelError, UserError

WEIGHT = "model.layers.0.mlp.up_proj.weight"


def save_tokenizer(folder, size):
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(folder)


@pytest.fixture
def folder(tmp_path):
    """A model of 37 tokens, and a tokenizer of as many."""
    tiny_models.llama(eos_token_id=1).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, tiny_models.VOCAB)
    return tmp_path


def load(folder):
    return load_model(ModelOptions(path=str(folder)))


def refusal(folder):
    """The message, which names the folder and is one line."""
    with pytest.raises(ModelError) as error:
        load(folder)
    message = str(error.value)
    assert f"model.path = '{folder}'" in message
    assert "\n" not in message
    return message


def set_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# ---- the folder ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [0, 5, 1000, 5000])
def test_truncated_weights_are_refused(folder, num_bytes):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    assert "cannot be loaded (model): SafetensorError" in refusal(folder)


def test_a_missing_weight_is_named_and_not_drawn_at_random(folder):
    weights = load_file(folder / "model.safetensors")
    del weights[WEIGHT]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert f"weights do not fit config.json: no weights for {WEIGHT}." in refusal(folder)


def test_a_config_with_more_layers_than_weights_is_refused(folder):
    set_config(folder, num_hidden_layers=3)
    assert "no weights for model.layers.2.input_layernorm.weight" in refusal(folder)


def test_weights_of_another_shape_are_named_with_both_shapes(folder):
    set_config(folder, intermediate_size=20)
    assert "model.layers.0.mlp.down_proj.weight is (16, 24) and must be (16, 20)" in refusal(folder)


@pytest.mark.parametrize("text", ["", "{oops", "[1]", '{"model_type": "nosuch"}'])
def test_a_broken_config_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    assert "cannot be loaded" in refusal(folder)


def test_a_wrong_value_in_the_config_is_named_with_its_field_and_value(folder):
    set_config(folder, hidden_size="many")
    message = refusal(folder)
    assert "hidden_size" in message
    assert "many" in message


def test_a_broken_generation_config_is_refused_and_not_passed_over(folder):
    # it may hold the only end token
    (folder / "generation_config.json").write_text("{")
    assert "JSONDecodeError" in refusal(folder)


@pytest.mark.parametrize("names", [["tokenizer.json", "tokenizer_config.json"], ["tokenizer.json"]])
def test_a_missing_tokenizer_is_refused_as_such(folder, names):
    for name in names:
        (folder / name).unlink()
    assert "cannot be loaded (tokenizer)" in refusal(folder)


def test_a_broken_tokenizer_is_refused_as_such(folder):
    (folder / "tokenizer.json").write_text("{}")
    assert "cannot be loaded (tokenizer)" in refusal(folder)


def test_a_tokenizer_larger_than_the_model_is_refused_with_both_numbers(folder):
    save_tokenizer(folder, 40)
    assert "the tokenizer has 40 tokens, the model only 37" in refusal(folder)


def test_a_tokenizer_smaller_than_the_model_is_fine(folder):
    save_tokenizer(folder, 30)
    assert len(load(folder).tokenizer) == 30


def test_a_tied_head_is_no_missing_weight(folder):
    tiny_models.tied_llama().save_pretrained(folder)
    model = load(folder).model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


# ---- end tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [99, -1, [1, 99]])
def test_end_tokens_outside_the_vocabulary_are_none(folder, named):
    set_config(folder, eos_token_id=named)
    assert load(folder).stop_token_ids == {1}


def test_a_model_whose_end_tokens_cannot_be_sampled_is_refused(folder):
    set_config(folder, eos_token_id=99)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 99}))
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token": None}))
    assert "it names only [99], which are not in its vocabulary. Set eos_token_id." in refusal(folder)


def test_end_tokens_of_the_options_must_be_in_the_vocabulary(folder):
    loaded = load(folder)
    check_stop_token_ids(loaded, [0, 36])
    says = r"^rollout.stop_token_ids must be token ids from 0 to 36, the model's vocabulary, got \[37, 99\]\.$"
    with pytest.raises(UserError, match=says):
        check_stop_token_ids(loaded, [99, 3, 37])


# ---- hardware --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpu", "meta", "xpu", ""])
def test_a_device_that_holds_no_numbers_here_is_refused(name):
    with pytest.raises(ModelError, match=f"^model.device must be a device of this machine, got '{name}': "):
        choose_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_gpu_where_there_is_none_is_refused(name):
    with pytest.raises(ModelError, match=f"^model.device must be a device of this machine, got '{name}': "):
        choose_device(name)


def test_there_is_one_cpu_whatever_number_it_is_given():
    assert choose_device("cpu:3") == torch.device("cpu")


def test_more_threads_than_cores_are_as_many_as_there_are_cores():
    # thousands would end the process: each is started
    before = torch.get_num_threads()
    try:
        assert set_threads(100_000) == torch.get_num_threads() == len(os.sched_getaffinity(0))
        assert set_threads(1) == torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
