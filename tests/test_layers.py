"""Lean layers: the numbers and gradients of transformers' own, and only where they are those."""

import copy
import pickle

import pytest
import torch
from torch.autograd import gradcheck
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from strop.layers import GatedSilu, RMSNorm, Rotation, use_lean_layers

MODELS = [
    (LlamaForCausalLM, LlamaConfig),
    (MistralForCausalLM, MistralConfig),
    (Qwen2ForCausalLM, Qwen2Config),
    (Qwen3ForCausalLM, Qwen3Config),
]


def model_of(kind, config, **more):
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    model = kind(config(**sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=None, **more)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.add_(torch.randn(weight.shape).mul_(0.3 if "norm" in name or "bias" in name else 0.1))
    return model


def lean_classes(model):
    return {type(m).__name__ for m in model.modules() if type(m).__base__.__name__ == type(m).__name__}


def numbers_of(model, mask=None):
    """Logits of two rows, and gradients of their squares."""
    ids, places = torch.arange(14).view(2, 7) % 30, torch.arange(7)[None].repeat(2, 1)
    logits = model(input_ids=ids, position_ids=places, attention_mask=mask, use_cache=False).logits
    model.zero_grad()
    (logits * torch.linspace(-1, 1, 30)).square().mean().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("kind", "config"), MODELS)
@pytest.mark.parametrize("is_masked", [False, True])
def test_logits_and_gradients_are_those_of_before(kind, config, is_masked):
    model = model_of(kind, config)
    mask = torch.zeros(2, 1, 7, 7).masked_fill(~torch.ones(7, 7).bool().tril(), -torch.inf) if is_masked else None
    weights, (logits, gradients) = list(model.parameters()), numbers_of(model, mask)
    use_lean_layers(model)
    assert len(lean_classes(model)) == 3
    assert all(one is other for one, other in zip(model.parameters(), weights, strict=True))
    found, mine = numbers_of(model, mask)
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            mine[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("shape", [(1, 1, 2, 4), (2, 3, 2, 4)])
def test_gradients_of_each_are_those_of_differences(shape):
    torch.manual_seed(0)
    x, y = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(shape[-1], dtype=torch.float64, requires_grad=True)
    angles = torch.randn(*shape[:2], 1, shape[-1] // 2, dtype=torch.float64).repeat(1, 1, 1, 2)
    assert gradcheck(lambda x, weight: RMSNorm.apply(x, weight, 1e-5), (x, weight))
    assert gradcheck(GatedSilu.apply, (x, y))
    assert gradcheck(lambda x: Rotation.apply(x, angles.cos(), angles.sin()), (x,))


def test_a_norm_of_zeros_and_of_large_numbers():
    x = torch.tensor([[0.0, 0.0], [1e15, -1e15]], requires_grad=True)
    found = RMSNorm.apply(x, torch.ones(2), 1e-6)
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.0], [1.0, -1.0]]))
    found.sum().backward()
    assert x.grad.isfinite().all()


def test_a_broken_row_leaves_the_others_alone():
    model = model_of(*MODELS[0])
    use_lean_layers(model)
    layer, x = model.model.layers[0].mlp, torch.randn(3, 32)
    whole = layer(x)
    x[1] = torch.nan
    torch.testing.assert_close(layer(x)[[0, 2]], whole[[0, 2]])
    assert layer(x)[1].isnan().all()


def test_other_numbers_and_devices_go_through_the_model_s_own_layers():
    model, plain = model_of(*MODELS[3]), model_of(*MODELS[3])
    use_lean_layers(model)
    ids = torch.arange(5)[None]
    found, wanted = (m.bfloat16()(input_ids=ids).logits for m in (model, plain))
    assert torch.equal(found, wanted)
    assert model.to("meta")(input_ids=ids.to("meta")).logits.shape == (1, 5, 30)


def test_a_cache_is_filled_by_the_model_s_own_attention():
    model, plain = model_of(*MODELS[2]), model_of(*MODELS[2])
    use_lean_layers(model)
    ids = torch.arange(6)[None]
    torch.manual_seed(1)
    wanted = plain.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0).tolist() == wanted.tolist()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_windows_and_other_attention_are_as_the_model_has_them(implementation):
    made = []
    for _ in range(2):
        model = model_of(*MODELS[1])
        model.config.sliding_window = 2
        model.set_attn_implementation(implementation)
        made.append(model)
    use_lean_layers(made[1])
    (wanted, gradients), (found, mine) = map(numbers_of, made)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-6)
    if implementation == "eager":
        found = made[1](input_ids=torch.arange(5)[None], use_cache=False, output_attentions=True)
        assert found.attentions[0].shape == (1, 4, 5, 5)


def test_dropout_of_attention_is_the_model_s():
    model = model_of(*MODELS[0], attention_dropout=0.5)
    use_lean_layers(model)
    model.train()
    assert not torch.equal(numbers_of(model)[0], numbers_of(model)[0])


@pytest.mark.parametrize("fault", ["other numbers", "raises"])
def test_a_model_whose_numbers_would_be_others_is_left_as_it_was(fault, monkeypatch):
    def computed(self, hidden_states):
        if fault == "raises":
            raise AttributeError("variance_epsilon")
        return hidden_states * self.weight * 2

    model = model_of(*MODELS[0])
    kind = type(model.model.norm)
    monkeypatch.setattr(kind, "forward", computed)
    classes = [type(m) for m in model.modules()]
    if fault == "raises":
        monkeypatch.undo()
        monkeypatch.setattr("strop.layers.RMSNorm.apply", lambda *_: computed(None, None))
    use_lean_layers(model)
    assert [type(m) for m in model.modules()] == classes


def test_models_of_other_classes_and_activations_keep_theirs():
    class LlamaMLP(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(LlamaMLP(2, 2))
    use_lean_layers(model)
    assert type(model[0]) is LlamaMLP
    relu, plain = (model_of(*MODELS[0], hidden_act="relu") for _ in range(2))
    use_lean_layers(relu)
    assert len(lean_classes(relu)) == 3
    torch.testing.assert_close(numbers_of(relu)[0], numbers_of(plain)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_compute_with_their_own_weights(copied):
    """Ranks are sent a model by pickle."""
    model = model_of(*MODELS[0])
    use_lean_layers(model)
    twin = copied(model)
    assert lean_classes(twin) == lean_classes(model)
    torch.testing.assert_close(numbers_of(twin), numbers_of(model))
    with torch.no_grad():
        twin.model.norm.weight.zero_()
    assert not numbers_of(twin)[0].any()
    assert numbers_of(model)[0].any()


def test_less_is_kept_for_the_backward_pass():
    kept = []
    for is_lean in (False, True):
        model, seen = model_of(*MODELS[0]), {}
        if is_lean:
            use_lean_layers(model)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, seen=seen: seen.update({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}) or x,
            lambda x: x,
        ):
            model(input_ids=torch.arange(20)[None], use_cache=False).logits  # noqa: B018
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept.append(sum(size for place, size in seen.items() if place not in own))
    assert kept[1] < 0.8 * kept[0], kept
