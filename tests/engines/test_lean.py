"""The pass without modules gives what the model gives, whatever shares a prompt, ends or moves; other shapes do not get it."""

import pytest
import tiny_models
import torch
from transformers import LlamaForCausalLM

from strop.config.lora import LoraOptions
from strop.engines.choose import choose_decoder
from strop.engines.decoders import last_logits
from strop.engines.lean import SHORT_PROMPT, LeanSharedDecoder, LeanSlotDecoder, lean_decoder
from strop.engines.shared_prompts import SharedPromptDecoder
from strop.trainers import attach_adapters

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}


def adapted():
    model = tiny_models.llama()
    attach_adapters(
        model, LoraOptions(rank=2, target_modules=("q_proj", "down_proj", "embed_tokens", "lm_head")), seed=0
    )
    return model


MODELS = {
    "llama": tiny_models.llama,
    "tied": tiny_models.tied_llama,
    "biases": lambda: tiny_models.llama(attention_bias=True, mlp_bias=True),
    "llama3 positions": lambda: tiny_models.llama(rope_parameters=LLAMA3),
    "qwen2": tiny_models.qwen2,
    "qwen3": tiny_models.qwen3,
    "adapters": adapted,
}


@pytest.mark.parametrize("prompt_width", [4, SHORT_PROMPT + 1])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_tokens_of_all_slots_get_the_models_own_logits(name, prompt_width):
    """Slots are filled, take tokens, end and move; what shares prompts evenly at first does not at the end."""
    model = MODELS[name]().eval()
    _change(model)
    decoder = lean_decoder(model, num_slots=5, prompt_width=prompt_width, response_width=8)
    assert isinstance(decoder, LeanSlotDecoder if prompt_width <= SHORT_PROMPT else LeanSharedDecoder)
    rows = [[3, 4, 5, 6], [3, 4, 5, 6], [7], [7]]
    decoder.prefill([rows[0], rows[2]], [(0, 1), (2, 3)])
    _step(decoder, model, rows)
    rows.append([8, 9])
    decoder.prefill(rows[4:], [(4,)])
    _step(decoder, model, rows)
    decoder.move(4, 0)
    rows[0] = rows.pop()
    _step(decoder, model, rows)
    rows += [[3, 4, 5, 6], [7]]  # the first of them moves into slot 3, whose prompt is asked for again
    decoder.move(3, 0)
    rows[0] = rows.pop(3)
    decoder.prefill(rows[3:], [(3,), (4,)])
    _step(decoder, model, rows)
    _change(model)  # an update of the weights in place
    decoder.forget()
    rows = [[1, 2], [4]]
    decoder.prefill(rows, [(0,), (1,)])
    _step(decoder, model, rows)


def _change(model):
    """Weights in which nothing is 0 or 1."""
    noise = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=noise)


def _step(decoder, model, rows):
    for row in rows:
        row.append((7 * len(row) + 3 * row[0]) % tiny_models.VOCAB)
    found = decoder.decode(torch.tensor([row[-1] for row in rows]))
    wanted = last_logits(model, rows, torch.device("cpu"), {"use_cache": False})
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_shape_are_sampled_by_it(name, dtype):
    assert choose_decoder(MODELS[name]().to(dtype)) is lean_decoder


@pytest.mark.parametrize(
    "changes", [{"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, {"hidden_act": "gelu"}]
)
def test_variants_that_it_does_not_know_are_sampled_by_the_model(changes):
    assert choose_decoder(tiny_models.llama(**changes)) is SharedPromptDecoder


def test_a_class_of_the_same_name_from_elsewhere_is_sampled_by_the_model():
    elsewhere = type("LlamaForCausalLM", (LlamaForCausalLM,), {})
    assert choose_decoder(elsewhere(tiny_models.llama().config).eval()) is SharedPromptDecoder
