"""The trainer's log-probabilities are those of the model's own forward pass, for every kind of head and layout."""

import copy
import math
from dataclasses import replace

import pytest
import tiny_architectures
import tiny_models
import torch
from made_batches import (
    make_batch,
    make_objective,
    make_rollout,
    make_trainer,
    parameters,
    random_rows,
    same_tensors,
    weighted,
)
from transformers import LlamaForCausalLM

from strop.data import build_batch
from strop.trainers.forward import TokenScorer
from strop.types import UserError

LAYOUTS = ["padded", "packed", "left_padded"]
ROWS = random_rows(2, vocab=tiny_models.VOCAB)


def by_plain_forward(model, rows, *, temperature=1.0):
    """Log-probabilities and entropies of all response tokens: one sequence at a time, log_softmax in float64."""
    logprobs, entropies = [], []
    for prompt, response in rows:
        ids = [*prompt, *response]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
        log_p = (logits / temperature).log_softmax(-1)
        for place in range(len(prompt), len(ids)):
            logprobs.append(log_p[place - 1, ids[place]].item())
            entropies.append(-(log_p[place - 1].exp() * log_p[place - 1]).sum().item())
    return logprobs, entropies


def scored(model, batch, layout, *, temperature=1.0):
    with torch.no_grad():
        return TokenScorer(model)(batch, temperature=temperature, layout=layout, with_entropy=True)


# ---- every model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", tiny_models.BUILDERS)
def test_logprobs_and_entropy_are_those_of_the_models_own_logits(name, temperature, layout):
    model = tiny_models.BUILDERS[name]()
    wanted = by_plain_forward(model, ROWS, temperature=temperature)
    logprobs, entropy = scored(model, make_batch(*ROWS), layout, temperature=temperature)
    # 2e-5: float32 attention and matrix products in other shapes
    assert logprobs.tolist() == pytest.approx(wanted[0], abs=2e-5)
    assert entropy.tolist() == pytest.approx(wanted[1], abs=2e-5)


@pytest.mark.parametrize("softcap", [2.0, 10.0, 30.0])
def test_a_capped_head_is_scored_with_its_cap(softcap):
    # 30 is what Gemma 2 ships with. It bends logits of this model (up to 4) by little, and the agreement asked for of
    # engine and trainer is 1e-4.
    model = tiny_models.gemma2(softcap=softcap)
    logprobs, _ = scored(model, make_batch(*ROWS), "padded")
    assert logprobs.tolist() == pytest.approx(by_plain_forward(model, ROWS)[0], abs=1e-4)


class CappedLlama(LlamaForCausalLM):
    """Caps its logits where no setting speaks of it."""

    cap = 2000.0

    def forward(self, *args, **rest):
        output = super().forward(*args, **rest)
        output.logits = self.cap * (output.logits / self.cap).tanh()
        return output


def test_a_cap_that_only_large_logits_would_feel_is_found_before_they_are_large():
    # logits of 4 are bent by a part in a million; the head then grows until they reach 800, bent to 760
    model = tiny_models.llama()
    model.__class__ = CappedLlama
    scorer = TokenScorer(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(200)
        found, _ = scorer(make_batch(*ROWS), temperature=1.0, layout="padded", with_entropy=False)
    wanted = by_plain_forward(model, ROWS)[0]
    assert min(wanted) < -700
    assert found.tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-2)  # float32 at 800


@pytest.mark.parametrize(
    "name, setting, value",
    [
        ("recurrent_gemma", "logits_soft_cap", 30.0),
        ("xlstm", "output_logit_soft_cap", 30.0),
        ("gemma2", "final_logit_softcapping", 30.0),
        ("granite", "logits_scaling", 1.005),
        ("cohere", "logit_scale", 1.005),
        ("falcon_h1", "lm_head_multiplier", 1.005),
    ],
)
def test_logits_scaled_or_capped_by_a_setting_are_the_models_own_in_bfloat16_too(name, setting, value):
    # 1.005 is below what bfloat16 tells apart: the setting's name says it
    model = tiny_architectures.build(name, **{setting: value}).bfloat16()
    batch = make_batch(([1, 2], [3, 4, 5]))
    found, _ = scored(model, batch, "padded")
    with torch.no_grad():
        log_p = model(input_ids=batch.tokens[None], use_cache=False).logits[0].float().log_softmax(-1)
    wanted = log_p[1:4].gather(-1, batch.tokens[2:, None])[:, 0]
    assert found.tolist() == pytest.approx(wanted.tolist(), abs=1e-5)  # the same bfloat16 logits


def test_the_trainer_gives_them_by_flat_token_with_zeros_elsewhere():
    model, batch = tiny_models.qwen2(), make_batch(*ROWS)
    found = make_trainer(model).logprobs(batch, temperature=0.7)
    assert found[batch.loss_mask].tolist() == pytest.approx(by_plain_forward(model, ROWS, temperature=0.7)[0], abs=2e-5)
    assert found[~batch.loss_mask].abs().max() == 0


@pytest.mark.parametrize("name", tiny_models.BUILDERS)
def test_gradients_are_those_of_the_models_own_logits(name):
    model, reference = tiny_models.BUILDERS[name](), tiny_models.BUILDERS[name]()
    logprobs, _ = TokenScorer(model)(make_batch(*ROWS), temperature=0.7, layout="padded", with_entropy=False)
    logprobs.sum().backward()
    for prompt, response in ROWS:
        ids = torch.tensor([[*prompt, *response]])
        log_p = (reference(input_ids=ids, use_cache=False).logits[0] / 0.7).log_softmax(-1)
        (-log_p[:-1].gather(-1, ids[0, 1:, None])[len(prompt) - 1 :].sum()).neg().backward()
    for (where, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() <= 2e-5 * q.grad.abs().max() + 1e-6, where


def test_a_head_bias_that_is_zero_still_learns():
    # at zero it cannot be seen in the logits
    model = tiny_models.phi()
    with torch.no_grad():
        model.lm_head.bias.zero_()
    make_trainer(model, lr=0.01).step(make_batch(*ROWS), make_objective())
    assert (model.lm_head.bias != 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", tiny_models.BUILDERS)
def test_a_sequence_never_sees_its_neighbours(name, layout):
    # what the neighbours are changes nothing of the last sequence, bit for bit, as long as their lengths stay
    model, last = tiny_models.BUILDERS[name](), ([1, 2], [3, 4, 5])
    first = scored(model, make_batch(([6, 7, 8], [9, 10]), last), layout)[0][-3:]
    other = scored(model, make_batch(([30, 31, 32], [33, 0]), last), layout)[0][-3:]
    assert torch.equal(first, other)
    assert first.tolist() == pytest.approx(by_plain_forward(model, [last])[0], abs=2e-5)


def test_a_model_that_cannot_be_packed_is_refused_where_packing_is_asked_for():
    # silently it would train every sequence on what stands before it (off by .3 nats here)
    model, batch = tiny_models.opt(), make_batch(*ROWS)
    assert scored(model, batch, "padded")[0].tolist() == pytest.approx(by_plain_forward(model, ROWS)[0], abs=2e-5)
    with pytest.raises(UserError, match=r"layout"):
        make_trainer(model, layout="packed").logprobs(batch)


# ---- case 19: a bigram model -----------------------------------------------------------------------------------------

LONG, SHORT = ([0, 1], [2, 2, 0]), ([1], [0])
LONG_LOGPROBS = [math.log(0.3), math.log(0.5), math.log(0.25)]  # 1 -> 2, 2 -> 2, 2 -> 0
SHORT_LOGPROBS = [math.log(0.1)]  # 1 -> 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "rows, wanted",
    [
        ([LONG], LONG_LOGPROBS),
        ([SHORT], SHORT_LOGPROBS),
        ([LONG, SHORT], LONG_LOGPROBS + SHORT_LOGPROBS),
        ([SHORT, LONG], SHORT_LOGPROBS + LONG_LOGPROBS),
    ],
)
def test_a_bigram_model_by_hand_alone_padded_and_packed(rows, wanted, layout):
    logprobs, _ = scored(tiny_models.bigram(), make_batch(*rows), layout)
    assert logprobs.tolist() == pytest.approx(wanted, abs=1e-6)


def test_the_bigram_entropy_by_hand():
    # row 1: .230259 + .306495 + .361192 = .897946; row 2: .346574 + .346574 + .346574 = 1.039721
    _, entropy = scored(tiny_models.bigram(), make_batch(LONG), "padded")
    assert entropy.tolist() == pytest.approx([0.897946, 1.039721, 1.039721], abs=1e-5)


# ---- case 20: an end token that is the pad token ---------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_end_token_equal_to_the_pad_token_is_trained_on(layout):
    # prompt [4], sampled [5, 6, 2] beside [5, 6, 7, 8, 9], which was cut at the limit: 3 and 5 tokens
    rows = [([4], [5, 6, 2]), ([4], [5, 6, 7, 8, 9])]
    model = tiny_models.llama(pad_token_id=2, eos_token_id=2)
    batch = make_batch(*rows)
    assert batch.num_trainable_tokens == 8
    logprobs, _ = scored(model, batch, layout)
    assert logprobs.tolist() == pytest.approx(by_plain_forward(model, rows)[0], abs=2e-5)


def test_token_zero_in_a_response_is_a_token_like_any_other():
    # rows are padded with id 0; a real 0 at the end of a response is scored all the same
    rows = [([4], [0, 0]), ([4, 5, 6], [7, 0, 0])]
    model = tiny_models.llama()
    logprobs, _ = scored(model, make_batch(*rows), "padded")
    assert logprobs.tolist() == pytest.approx(by_plain_forward(model, rows)[0], abs=2e-5)


def test_masked_tokens_between_sampled_ones_are_read_and_not_trained():
    # a tool result: sampled 5, read 6 7, sampled 8. The 8 is predicted from all before it.
    rollout = replace(make_rollout([4], [5, 6, 7, 8]), response_mask=(False, True, False, False, True))
    model = tiny_models.llama()
    logprobs, _ = scored(model, weighted(build_batch([rollout], [1.0])), "padded")
    whole = by_plain_forward(model, [([4], [5, 6, 7, 8])])[0]
    assert logprobs.tolist() == pytest.approx([whole[0], whole[3]], abs=2e-5)


# ---- the reference ---------------------------------------------------------------------------------------------------


def test_the_reference_stays_where_the_policy_began():
    model = tiny_models.llama()
    began = by_plain_forward(copy.deepcopy(model), ROWS)[0]
    batch = make_batch(*ROWS)
    trainer = make_trainer(model, lr=0.05, weight_decay=0.1, keeps_reference=True)
    for _ in range(3):
        trainer.step(
            replace(batch, ref_logprobs=trainer.logprobs(batch, model="reference")), make_objective(kl={"coef": 0.1})
        )
    reference = trainer.logprobs(batch, model="reference")[batch.loss_mask]
    assert reference.tolist() == pytest.approx(began, abs=2e-5)
    policy = trainer.logprobs(batch)[batch.loss_mask]
    assert (policy - reference).abs().max() > 0.1


def test_a_reference_that_was_not_kept_is_refused():
    with pytest.raises(ValueError, match="without a reference"):
        make_trainer(tiny_models.bigram()).logprobs(make_batch(LONG), model="reference")


def test_asking_for_logprobs_leaves_no_gradient_and_moves_nothing():
    model = tiny_models.llama()
    before = parameters(model)
    found = make_trainer(model).logprobs(make_batch(*ROWS))
    assert not found.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert same_tensors(before, parameters(model))


def test_the_trainer_has_no_dropout():
    # the sampler has none, and the two must agree
    model = tiny_models.gpt2().train()
    batch = make_batch(*ROWS)
    trainer = make_trainer(model)
    assert torch.equal(trainer.logprobs(batch), trainer.logprobs(batch))
    assert trainer.logprobs(batch)[batch.loss_mask].tolist() == pytest.approx(
        by_plain_forward(tiny_models.gpt2(), ROWS)[0], abs=2e-5
    )
