"""Layers, rows and batches divided at the same time, over four processes."""

from functools import partial

import pytest
import rank_processes
import tiny_models
import torch
from trainers.test_several_processes import both, check_equal, preset_objective, rows
from trainers.test_tensor_parallel import check_steps

from strop.config import CriticOptions
from strop.runtime.learning import prepare_update
from strop.trainers import TorchCritic, ValueModel, body_of


@pytest.fixture(scope="module")
def four():
    with rank_processes.opened(4) as found:
        yield found


@pytest.mark.parametrize(
    "layers, rows_", [(2, 1), (1, 2), (2, 2)], ids=["layers, batches", "rows, batches", "layers, rows"]
)
def test_steps_are_those_of_one_process(four, layers, rows_, tmp_path):
    four.tensor_parallel, four.context_parallel = layers, rows_
    build = partial(tiny_models.llama, num_key_value_heads=4, tie_word_embeddings=True)
    one, many = both(four, build, max_tokens_per_micro_batch=24, keeps_reference=True)
    objective = preset_objective("gspo")  # a ratio of whole sequences needs all tokens of a row
    lonely = prepare_update(objective, rows(7).select([0]), updates_done=1)  # for some ranks there is nothing
    check_equal(many.step(lonely, objective), one.step(lonely, objective))
    check_steps(one, many, objective, num_steps=2)
    found, wanted = (trainer.logprobs(rows(9), model="reference") for trainer in (many, one))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    many.save(tmp_path)
    one.load(tmp_path)
    assert one.digest() == many.digest()
    critics = both(four, lambda: ValueModel(body_of(build())), kind=TorchCritic, more=(CriticOptions(lr=1e-3),))
    for critic in critics:
        critic.step(rows())
    found, wanted = (critic.values(rows(1)) for critic in critics)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
