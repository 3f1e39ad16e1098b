"""The reduced losses of loss_numbers.json on other inputs: loss x token weight, summed, and its gradient, against loops over
sequences and tokens in Python floats. Every other function named there has its slow reference beside its own tests."""

import math
import random

import pytest
import torch

from strop import ops

F64 = torch.float64
SEEDS = range(6)
REDUCTIONS = ["token_mean", "sequence_mean", "prompt_mean", "constant_length"]
LONGEST = 16
LOW, HIGH, CAP, TAU_POS, TAU_NEG = 0.2, 0.28, 3.0, 1.0, 1.05


def made_step(seed):
    """Sequences of a step as (prompt, advantage, tokens); a token is (logprob, old_logprob, is trainable)."""
    draw = random.Random(seed)
    step = []
    for _ in range(draw.randint(4, 9)):
        tokens = []
        for _ in range(draw.randint(1, 10)):
            logprob = -draw.expovariate(0.8) - 1e-3
            tokens.append((logprob, logprob - draw.gauss(0, 0.5), draw.random() < 0.8))
        step.append((draw.randrange(3), draw.gauss(0, 1), tokens))
    step.append((3, 1.1, [(-0.4, -0.5, True)]))  # at least one trainable token
    return step


# ---- the slow reference: value and slope of a trainable token or of a sequence, case by case ------------------------


def ppo(ratio, advantage):
    if advantage > 0 and ratio > 1 + HIGH:
        return -advantage * (1 + HIGH), 0.0
    if advantage < 0 and ratio < 1 - LOW:
        return -advantage * (1 - LOW), 0.0
    if advantage < 0 and ratio > CAP:
        return -advantage * CAP, 0.0
    return -advantage * ratio, -advantage * ratio


def sapo(ratio, advantage):
    tau = TAU_POS if advantage > 0 else TAU_NEG
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -advantage * 4 / tau * gate, -advantage * 4 * gate * (1 - gate) * ratio


def by_token(of_ratio):
    def slow(weights, advantage, tokens):
        loss, slopes = 0.0, []
        for weight, (logprob, old, _) in zip(weights, tokens, strict=True):
            value, slope = of_ratio(math.exp(logprob - old), advantage)
            loss += weight * value
            slopes.append(weight * slope)
        return loss, slopes

    return slow


def slow_cispo(weights, advantage, tokens):
    cut = [min(max(math.exp(x - old), 1 - LOW), 1 + HIGH) for x, old, _ in tokens]
    loss = sum(-w * c * advantage * x for w, c, (x, _, _) in zip(weights, cut, tokens, strict=True))
    return loss, [-w * c * advantage for w, c in zip(weights, cut, strict=True)]


def slow_gspo(weights, advantage, tokens):
    value, slope = _one_ratio(tokens, advantage)
    return sum(weights) * value, [sum(weights) * slope / len(tokens)] * len(tokens)


def slow_gspo_token(weights, advantage, tokens):
    value, slope = _one_ratio(tokens, advantage)
    return sum(weights) * value, [weight * slope for weight in weights]


def _one_ratio(tokens, advantage):
    ratio = math.exp(sum(x - old for x, old, _ in tokens) / len(tokens))
    if advantage > 0 and ratio > 1 + HIGH:
        return -advantage * (1 + HIGH), 0.0
    if advantage < 0 and ratio < 1 - LOW:
        return -advantage * (1 - LOW), 0.0
    return -advantage * ratio, -advantage * ratio


def slow_gmpo(weights, advantage, tokens):
    log_ratios = [x - old for x, old, _ in tokens]
    is_cut = [d > HIGH if advantage > 0 else d < -LOW for d in log_ratios]
    bound = HIGH if advantage > 0 else -LOW
    mean = sum(bound if cut else d for d, cut in zip(log_ratios, is_cut, strict=True)) / len(tokens)
    value = -advantage * math.exp(mean)
    return sum(weights) * value, [0.0 if cut else sum(weights) * value / len(tokens) for cut in is_cut]


def slow_weights(step, reduction):
    """The weight of each trainable token of each sequence, by counting."""
    counts = [sum(trainable for *_, trainable in tokens) for _, _, tokens in step]
    num_sequences = sum(count > 0 for count in counts)
    of_prompt = {p: sum(c for (q, _, _), c in zip(step, counts, strict=True) if q == p) for p, _, _ in step}
    num_prompts = sum(total > 0 for total in of_prompt.values())
    for (prompt, _, _), count in zip(step, counts, strict=True):
        weight = {
            "token_mean": 1 / sum(counts),
            "sequence_mean": 1 / (num_sequences * max(count, 1)),
            "prompt_mean": 1 / (num_prompts * max(of_prompt[prompt], 1)),
            "constant_length": 1 / (num_sequences * LONGEST),
        }
        yield [weight[reduction]] * count


BAND = {"eps_clip": LOW, "eps_clip_high": HIGH}
LOSSES = {
    "ppo_clip": (lambda t, _: ops.ppo_clip(*t, **BAND, eps_clip_c=CAP), by_token(ppo)),
    "cispo": (lambda t, _: ops.cispo(*t, **BAND), slow_cispo),
    "sapo": (lambda t, _: ops.sapo(*t, tau_pos=TAU_POS, tau_neg=TAU_NEG), by_token(sapo)),
    "gspo": (lambda t, where: ops.gspo(*t, *where, **BAND), slow_gspo),
    "gspo_token": (lambda t, where: ops.gspo_token(*t, *where, **BAND), slow_gspo_token),
    "gmpo": (lambda t, where: ops.gmpo(*t, *where, **BAND), slow_gmpo),
}


@pytest.mark.parametrize("is_weighed_unevenly", [False, True], ids=["plain", "corrected"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_reduced_loss_and_its_gradient_equal_the_slow_reference(seed, name, reduction, is_weighed_unevenly):
    """Unevenly: each token's loss times a factor of its own, as a correction does; a sequence's loss then mixes them."""
    step, (call, slow) = made_step(seed), LOSSES[name]
    rows = [(s, p, a, *token) for s, (p, a, tokens) in enumerate(step) for token in tokens]
    columns = list(zip(*rows, strict=True))
    sequences, prompts, mask = (torch.tensor(columns[i]) for i in (0, 1, 5))
    advantages, logprobs, old = (torch.tensor(columns[i], dtype=F64) for i in (2, 3, 4))
    logprobs.requires_grad_()
    factors = [1 + i % 3 if is_weighed_unevenly else 1 for i in range(len(rows))]

    weights = ops.token_weights(
        mask, sequences, reduction=reduction, group_ids=prompts, max_response_tokens=LONGEST
    ) * torch.tensor(factors)
    loss = (weights * call((logprobs, old, advantages), (mask, sequences)).loss).sum()
    slopes = torch.autograd.grad(loss, logprobs)[0]

    wanted, wanted_slopes, at = 0.0, [], 0
    for (_, advantage, tokens), own in zip(step, slow_weights(step, reduction), strict=True):
        trained = [token for token in tokens if token[2]]
        own_factors = [f for f, (*_, m) in zip(factors[at : at + len(tokens)], tokens, strict=True) if m]
        at += len(tokens)
        if not trained:
            continue
        value, row = slow([w * f for w, f in zip(own, own_factors, strict=True)], advantage, trained)
        wanted += value
        wanted_slopes += row
    assert loss.item() == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    assert slopes[mask].tolist() == pytest.approx(wanted_slopes, rel=1e-9, abs=1e-9)
    assert not slopes[~mask].any()


def test_the_steps_have_masked_tokens_and_sequences_on_both_sides_of_the_bounds():
    steps = [made_step(seed) for seed in SEEDS]
    ratios = [(a, math.exp(x - o)) for step in steps for _, a, row in step for x, o, m in row if m]
    assert any(not m for step in steps for _, _, row in step for *_, m in row)
    assert any(a > 0 and r > 1 + HIGH for a, r in ratios)
    assert any(a < 0 and r < 1 - LOW for a, r in ratios)
    assert any(a < 0 and r > CAP for a, r in ratios)
