"""A trainer over two or three processes against one in this process: equal numbers, whatever it is asked for."""

from dataclasses import replace
from functools import partial

import pytest
import rank_processes
import tiny_models
import torch
from trainers.made_batches import GivenLosses, make_batch, parameters, random_rows, weighted

from strop.algorithms import PolicyObjective
from strop.config import AlgorithmOptions, CriticOptions, TorchTrainerOptions, TrainConfig, make_config
from strop.config.lora import LoraOptions
from strop.config.presets import PRESETS
from strop.runtime.learning import prepare_update
from strop.trainers import TorchCritic, TorchTrainer, ValueModel, attach_adapters, body_of
from strop.types import GuardError, UserError

pytestmark = pytest.mark.long
VOCAB, NUM_STEPS = tiny_models.VOCAB, 10
# Each step adds up some tens of terms in another order (1e-7 of rounding), and AdamW makes steps of the learning rate of
# gradients however small: after ten steps weights of order 1 agree to about 1e-6.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module", params=[2, 3], ids=["two", "three"])
def ranks(request):
    with rank_processes.opened(request.param) as found:
        yield found


of_three = pytest.mark.parametrize("ranks", [3], indirect=True, ids=["three"])


def both(ranks, build, *, kind=TorchTrainer, more=(), total_steps=NUM_STEPS, **given):
    """The same learner in this process alone, and over the ranks."""
    keeps = {"keeps_reference": given.pop("keeps_reference")} if "keeps_reference" in given else {}
    options = TorchTrainerOptions(**{"lr": 1e-3, "max_tokens_per_micro_batch": 64} | given)
    arguments = (*more, options)
    one = kind(build(), *arguments, total_steps=total_steps, **keeps)
    return one, ranks.make(kind, build(), *arguments, total_steps=total_steps, **keeps)


def rows(seed=0, count=7):
    """Uneven sequences in three groups, advantages of both signs."""
    batch = make_batch(
        *random_rows(seed, vocab=VOCAB, count=count), advantages=[(-1) ** i * (0.5 + i) for i in range(count)]
    )
    ids = torch.arange(count) % 3
    generator = torch.Generator().manual_seed(seed)
    noise = 0.4 * torch.randn(3, *batch.tokens.shape, generator=generator)
    logprobs = torch.where(batch.loss_mask, -3.0 + noise, 0.0)
    return replace(
        batch,
        group_ids=ids[batch.sequence_ids],
        old_logprobs=logprobs[0],
        rollout_logprobs=logprobs[1],
        ref_logprobs=logprobs[2],
        old_values=noise[0],
        returns=noise[1],
    )


def check_equal(found, wanted, *, but=()):
    assert found.keys() == wanted.keys()
    for name in wanted.keys() - {"padding_share", *but}:
        assert found[name].value == pytest.approx(wanted[name].value, rel=1e-4, abs=1e-5), name


def check_same_weights(one, many):
    many.publish()
    wanted, found = parameters(one.model), parameters(many.model)
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


def objective_of(**algorithm):
    return PolicyObjective(AlgorithmOptions.model_validate(algorithm), temperature=1.0, max_response_tokens=9)


# ---- equal steps ----------------------------------------------------------------------------------------------------


def preset_objective(preset):
    values = {
        "model": {"path": "m"},
        "data": {"kind": "jsonl", "path": "d"},
        "reward": {"kind": "exact"},
        "rollout": {"max_response_tokens": 9},
        "algorithm": {"preset": preset},
    }
    options = make_config(TrainConfig, values, {}, file="run.toml").algorithm
    return PolicyObjective(options, temperature=0.9, max_response_tokens=9)


@pytest.mark.parametrize("preset", PRESETS)
def test_ten_steps_of_a_preset_are_those_of_one_process(ranks, preset):
    one, many = both(ranks, tiny_models.llama)
    objective = preset_objective(preset)
    for step in range(NUM_STEPS):
        batch = prepare_update(objective, rows(step), updates_done=1)
        check_equal(many.step(batch, objective), one.step(batch, objective))
    check_same_weights(one, many)


def test_ten_steps_of_a_critic_are_those_of_one_process(ranks):
    def build():
        return ValueModel(body_of(tiny_models.llama()))

    one, many = both(ranks, build, kind=TorchCritic, more=(CriticOptions(lr=1e-3),))
    for step in range(NUM_STEPS):
        check_equal(many.step(rows(step)), one.step(rows(step)))
    torch.testing.assert_close(many.values(rows()), one.values(rows()), **CLOSE)
    check_same_weights(one, many)


def test_case_5_the_loss_of_uneven_sequences_is_1_75_on_every_number_of_ranks(ranks):
    """P: 1 token of loss 4; Q: 3 tokens of loss 1. With three ranks one has no tokens."""
    _, many = both(ranks, tiny_models.bigram)
    for reduction, limit, wanted in (
        ("token_mean", None, 1.75),
        ("sequence_mean", None, 2.5),
        ("constant_length", 8, 0.4375),
    ):
        batch = make_batch(([0], [1]), ([0], [1, 2, 0]), advantages=[4.0, 1.0])
        batch = weighted(batch, reduction=reduction, max_response_tokens=limit)
        assert many.step(batch, GivenLosses())["loss"].value == pytest.approx(wanted, rel=1e-6)


def test_ranks_without_tokens_take_part(ranks):
    one, many = both(ranks, tiny_models.llama)
    batch, objective = rows().select([0]), objective_of()
    check_equal(many.step(batch, objective), one.step(batch, objective))
    check_same_weights(one, many)


def lora_llama():
    model = tiny_models.llama()
    attach_adapters(model, LoraOptions(rank=2), seed=0)
    return model


@of_three
@pytest.mark.parametrize(
    "build, given",
    [
        (tiny_models.tied_llama, {}),
        (tiny_models.gemma2, {}),  # no plain head
        (tiny_models.llama, {"max_tokens_per_micro_batch": 12}),  # ranks with several micro-batches, not as many each
        (tiny_models.llama, {"layout": "packed"}),
        (tiny_models.llama, {"layout": "shared"}),
        (tiny_models.llama, {"activation_checkpointing": True}),
        (tiny_models.llama, {"max_grad_norm": 0.01}),  # the norm is that of all parts
        (lora_llama, {"keeps_reference": True}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "-".join(value) or "plain",
)
def test_a_step_is_that_of_one_process(ranks, build, given):
    one, many = both(ranks, build, **given)
    objective = objective_of(entropy_coef=0.01)
    for step in range(2):
        batch = prepare_update(objective, rows(step), updates_done=1)
        check_equal(many.step(batch, objective), one.step(batch, objective))
    check_same_weights(one, many)
    for which in ("policy", "reference") if given.get("keeps_reference") else ("policy",):
        found, wanted = (trainer.logprobs(rows(9), model=which) for trainer in (many, one))
        torch.testing.assert_close(found, wanted, **CLOSE)


@of_three
def test_bfloat16_learns_by_sharded_float32_masters(ranks):
    """Gradients are rounded in another order (2^-9 each); the masters keep steps that bfloat16 would lose."""
    one, many = both(ranks, lambda: tiny_models.llama().bfloat16(), lr=1e-4)
    objective = objective_of()
    torch.testing.assert_close(many.logprobs(rows()), one.logprobs(rows()), rtol=0, atol=0.1)
    for step in range(2):
        batch = prepare_update(objective, rows(step), updates_done=1)
        found, wanted = many.step(batch, objective), one.step(batch, objective)
        assert found["loss"].value == pytest.approx(wanted["loss"].value, rel=0.05)
        assert found["grad_norm"].value == pytest.approx(wanted["grad_norm"].value, rel=0.05)
    masters = dict(many._learning.named_parameters())
    assert {p.dtype for p in masters.values()} == {torch.float32}
    many.publish()
    assert {p.dtype for p in many.model.parameters()} == {torch.bfloat16}
    part = masters["lm_head.weight"].to_local()  # rank 0's
    assert torch.equal(part.bfloat16(), many.model.lm_head.weight[: len(part)])
    assert not torch.equal(part, part.bfloat16().float())


# ---- what else a run asks for ---------------------------------------------------------------------------------------


@of_three
def test_the_reference_stays_until_it_is_refreshed(ranks):
    _, many = both(ranks, tiny_models.llama, keeps_reference=True)
    before, objective = many.logprobs(rows()), objective_of()
    many.step(prepare_update(objective, rows(), updates_done=1), objective)
    after = many.logprobs(rows())
    assert torch.equal(many.logprobs(rows(), model="reference"), before)
    assert not torch.equal(after, before)
    many.refresh_reference()
    assert torch.equal(many.logprobs(rows(), model="reference"), after)


@of_three
def test_going_back_gives_weights_and_moments_as_they_were(ranks, tmp_path):
    _, many = both(ranks, tiny_models.llama)
    objective, folders = objective_of(), [tmp_path / name for name in ("before", "moved", "back", "weights")]
    step = partial(many.step, prepare_update(objective, rows(), updates_done=1), objective)
    for folder in folders:
        folder.mkdir()
    step()
    many.remember(moments=True)
    many.save(folders[0])
    step()
    many.save(folders[1])
    many.go_back()
    many.save(folders[2])
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders[:3]]
    assert files[0] == files[2] != files[1]
    many.remember(moments=False)
    step()
    many.go_back()
    many.save(folders[3])
    assert (folders[3] / "weights.safetensors").read_bytes() == files[0]["weights.safetensors"]
    assert (folders[3] / "optimizer.safetensors").read_bytes() != files[0]["optimizer.safetensors"]
    many.forget()


@of_three
def test_a_loss_that_is_not_finite_names_its_sequence_and_the_next_step_is_made(ranks):
    one, many = both(ranks, tiny_models.llama)
    good = rows()
    advantages = torch.where(good.sequence_ids == 4, torch.nan, good.advantages)
    said = []
    for trainer in (one, many):
        with pytest.raises(GuardError) as error:
            trainer.step(replace(good, advantages=advantages), GivenLosses())
        said.append(str(error.value))
    assert said[0] == said[1]
    assert "It comes from sample 0 of prompt row 4." in said[0]
    check_equal(many.step(good, GivenLosses()), one.step(good, GivenLosses()))
    check_same_weights(one, many)


@of_three
def test_a_guard_of_rank_0_stops_the_step_in_all(ranks):
    def watch(metrics):
        if watch.refuses:
            raise GuardError("no such step", guard="loss_jump")

    watch.refuses = True
    options = TorchTrainerOptions(lr=1e-3)
    many = ranks.make(TorchTrainer, tiny_models.llama(), options, total_steps=3, here={"watch": watch})
    before = many.digest()
    with pytest.raises(GuardError, match="no such step"):
        many.step(rows(), GivenLosses())
    assert (many.digest(), many.num_steps) == (before, 0)
    watch.refuses = False
    many.step(rows(), GivenLosses())
    assert many.digest() != before


@of_three
def test_unreduced_losses_are_those_of_one_process(ranks):
    one, many = both(ranks, tiny_models.llama)
    batch, objective = prepare_update(objective_of(), rows(), updates_done=1), objective_of()
    for found, wanted in zip(many.token_losses(batch, objective), one.token_losses(batch, objective), strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE)


@of_three
def test_a_state_is_the_same_file_on_any_number_of_processes(ranks, tmp_path):
    """What one process saves the ranks load and save again, byte for byte, and go on from as that one does."""
    one, many = both(ranks, tiny_models.llama, keeps_reference=True)
    objective = objective_of()
    one.step(prepare_update(objective, rows(), updates_done=1), objective)
    one.refresh_reference()
    one.step(prepare_update(objective, rows(1), updates_done=1), objective)
    folders = [tmp_path / "one", tmp_path / "many"]
    for folder, trainer in zip(folders, (one, many), strict=True):
        folder.mkdir()
        if trainer is many:
            trainer.load(folders[0])
        trainer.save(folder)
    files = [{path.name: path.read_bytes() for path in sorted(folder.iterdir())} for folder in folders]
    assert files[0] == files[1]
    assert (one.digest(), one.num_steps) == (many.digest(), many.num_steps)
    assert torch.equal(one.model.lm_head.weight, many.model.lm_head.weight)  # published
    batch = prepare_update(objective, rows(2), updates_done=1)
    check_equal(many.step(batch, objective), one.step(batch, objective))
    check_same_weights(one, many)


@of_three
def test_a_state_of_another_model_is_refused_and_the_ranks_go_on(ranks, tmp_path):
    other, many = make_other(), both(ranks, tiny_models.llama)[1]
    other.save(tmp_path)
    with pytest.raises(UserError, match="weights do not fit the model"):
        many.load(tmp_path)
    many.step(rows(), GivenLosses())


def make_other():
    return TorchTrainer(tiny_models.llama(hidden_size=8), TorchTrainerOptions(), total_steps=1)
