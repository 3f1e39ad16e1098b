"""What a trainer saves is all it holds: a loaded one goes on bit for bit."""

import json

import pytest
import tiny_models
import torch
from made_batches import make_batch, make_objective, make_trainer, parameters, random_rows, same_tensors, saved_state

from strop.types import UserError

ROWS = [
    make_batch(*random_rows(seed, vocab=tiny_models.VOCAB), advantages=[1.0, -1.0] * 3 + [0.5]) for seed in range(6)
]
OPTIONS = {"lr": 0.01, "weight_decay": 0.1, "lr_schedule": "linear", "warmup_steps": 2, "total_steps": 6}


def trainer_of(build, seed=0):
    return make_trainer(build(seed), **OPTIONS)


def steps(trainer, batches):
    return [trainer.step(batch, make_objective())["loss"].value for batch in batches]


@pytest.mark.parametrize("build", [tiny_models.llama, tiny_models.tied_llama, tiny_models.gpt2])
def test_stopping_and_going_on_is_as_if_nothing_had_happened(build, tmp_path):
    straight = trainer_of(build)
    losses = steps(straight, ROWS)
    first = trainer_of(build)
    begun = steps(first, ROWS[:3])
    first.save(tmp_path)
    second = trainer_of(build, seed=5)  # other weights than the saved ones
    second.load(tmp_path)
    assert second.num_steps == 3
    assert same_tensors(parameters(first.model), parameters(second.model))
    assert begun + steps(second, ROWS[3:]) == losses
    assert same_tensors(parameters(straight.model), parameters(second.model))
    assert saved_state(straight, tmp_path / "a") == saved_state(second, tmp_path / "b")


def test_a_trainer_that_has_already_moved_forgets_its_own_moments_when_it_loads(tmp_path):
    fresh = trainer_of(tiny_models.llama)
    fresh.save(tmp_path)  # before any step: there are no moments yet
    wanted = steps(fresh, ROWS[:2])
    used = trainer_of(tiny_models.llama, seed=5)
    steps(used, ROWS[2:5])
    used.load(tmp_path)
    assert used.num_steps == 0
    assert steps(used, ROWS[:2]) == wanted
    assert same_tensors(parameters(fresh.model), parameters(used.model))


def test_saving_changes_nothing(tmp_path):
    watched, other = trainer_of(tiny_models.llama), trainer_of(tiny_models.llama)
    steps(watched, ROWS[:1])
    watched.save(tmp_path)
    steps(other, ROWS[:1])
    assert steps(watched, ROWS[1:2]) == steps(other, ROWS[1:2])
    assert same_tensors(parameters(watched.model), parameters(other.model))


def test_the_state_is_safetensors_and_json_without_pickle(tmp_path):
    trainer = trainer_of(tiny_models.tied_llama)
    steps(trainer, ROWS[:2])
    state = saved_state(trainer, tmp_path / "state")
    assert set(state) == {"weights.safetensors", "optimizer.safetensors", "trainer.json"}
    assert json.loads(state["trainer.json"]) == {"num_steps": 2}


def test_weights_of_another_shape_are_refused_by_name_with_both_shapes(tmp_path):
    trainer_of(tiny_models.llama).save(tmp_path)
    other = make_trainer(tiny_models.llama(intermediate_size=20))
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.gate_proj\.weight \(24, 16\) for \(20, 16\)"):
        other.load(tmp_path)


def test_weights_of_another_model_are_refused_with_both_lists(tmp_path):
    trainer_of(tiny_models.llama).save(tmp_path)
    with pytest.raises(UserError) as error:
        make_trainer(tiny_models.tied_llama()).load(tmp_path)
    assert "unexpected ['lm_head.weight']" in str(error.value)
    trainer_of(tiny_models.tied_llama).save(tmp_path)
    with pytest.raises(UserError) as error:
        make_trainer(tiny_models.llama()).load(tmp_path)
    assert "missing ['lm_head.weight']" in str(error.value)


def test_a_refused_load_leaves_the_trainer_as_it_was(tmp_path):
    trainer_of(tiny_models.llama).save(tmp_path)
    other = make_trainer(tiny_models.llama(intermediate_size=20))
    before = parameters(other.model)
    with pytest.raises(UserError):
        other.load(tmp_path)
    assert same_tensors(before, parameters(other.model))
    assert other.num_steps == 0


def test_tied_weights_are_given_once_and_stay_tied_after_loading(tmp_path):
    trainer = trainer_of(tiny_models.tied_llama)
    steps(trainer, ROWS[:1])
    trainer.save(tmp_path)
    names = [name for name, _ in trainer.weights()]
    assert "lm_head.weight" not in names
    assert len(names) == len(set(names))
    loaded = trainer_of(tiny_models.tied_llama, seed=5)
    loaded.load(tmp_path)
    model = loaded.model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert torch.equal(model.lm_head.weight, trainer.model.model.embed_tokens.weight)


def test_frozen_parameters_stay_and_the_rest_learns(tmp_path):
    model = tiny_models.llama()
    model.model.embed_tokens.weight.requires_grad_(False)
    before = parameters(model)
    trainer = make_trainer(model, **OPTIONS)
    steps(trainer, ROWS[:1])
    after = parameters(model)
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])
