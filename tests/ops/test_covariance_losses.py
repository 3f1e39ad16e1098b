"""Clip-Cov and KL-Cov: which tokens of a step are selected, and what becomes of them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.ops import ppo_clip
from strop.ops.policy_loss import (
    clip_cov,
    covariances,
    covariances_in_band,
    importance_sampling,
    kl_cov,
    largest_covariances,
)

F64 = torch.float64
seeded = settings(derandomize=True, deadline=None, max_examples=60)
# (old_logprob, advantage, is trainable) on grids of eighths: many ties, and no rounding in sums
STEPS = st.lists(
    st.tuples(st.integers(-64, 0).map(lambda x: x / 8), st.integers(-16, 16).map(lambda x: x / 8), st.booleans()),
    min_size=1,
    max_size=12,
)


def step(rows, *, planted=None):
    old, advantages = (
        torch.tensor([row[i] if row[2] or planted is None else planted for row in rows], dtype=F64) for i in (0, 1)
    )
    return old, advantages, torch.tensor([row[2] for row in rows], dtype=torch.bool)


def leaf(values):
    return torch.tensor(values, dtype=F64, requires_grad=True)


def gradient(loss, logprobs):
    return torch.autograd.grad(loss.sum(), logprobs)[0]


# Trainable: old -1, -3, 0, -4 (mean -2) with A 1, -1, 1, -1 (mean 0): distances 1, -1, 2, -2: covariances 1, 1, 2, 2.
# Then old -2 with A 0: covariance 0. The masked one would have the largest of all.
FIVE = [
    (-1.0, 1.0, True),
    (-3.0, -1.0, True),
    (90.0, 9.0, False),
    (0.0, 1.0, True),
    (-4.0, -1.0, True),
    (-2.0, 0.0, True),
]


def test_covariances_by_hand():
    assert covariances(*step(FIVE)).tolist() == [1.0, 1.0, -math.inf, 2.0, 2.0, 0.0]


@seeded
@given(STEPS)
def test_covariances_equal_the_slow_reference_and_average_to_the_covariance(rows):
    kept = [(x, a) for x, a, m in rows if m]
    found = covariances(*step(rows))
    if not kept:
        assert found.tolist() == [-math.inf] * len(rows)
        return
    mean_x, mean_a = (math.fsum(row[i] for row in kept) / len(kept) for i in (0, 1))
    expected = [(x - mean_x) * (a - mean_a) if m else -math.inf for x, a, m in rows]
    assert found.tolist() == pytest.approx(expected, rel=1e-11, abs=1e-11)
    # E[xa] - E[x] E[a]
    covariance = math.fsum(x * a for x, a in kept) / len(kept) - mean_x * mean_a
    assert found[found.isfinite()].mean().item() == pytest.approx(covariance, abs=1e-11)


@pytest.mark.parametrize(
    "fraction, selected",
    [
        (0.2, [False, False, False, True, True, False]),  # one of five, and the one that ties with it
        (0.4, [False, False, False, True, True, False]),
        (0.59, [False, False, False, True, True, False]),  # 2.95 of five: two
        (0.6, [True, True, False, True, True, False]),
        (1e-9, [False, False, False, True, True, False]),  # at least one
        (1.0, [True, True, False, True, True, False]),  # a covariance of 0 lowers no entropy
    ],
)
def test_the_largest_covariances_by_hand(fraction, selected):
    assert largest_covariances(*step(FIVE), cov_fraction=fraction).tolist() == selected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [6, 7, 100, 1000])
@pytest.mark.parametrize("advantage", [0.0, 0.7, -1.3])
def test_where_all_advantages_are_equal_none_is_selected(advantage, count, dtype):
    """Rounding of their mean must not decide; with all selected the penalty would fall on every token."""
    old = -torch.rand(count, generator=torch.Generator().manual_seed(count), dtype=dtype)
    mask = torch.ones(count, dtype=torch.bool)
    equal = torch.full((count,), advantage, dtype=dtype)
    assert not largest_covariances(old, equal, mask, cov_fraction=2e-4).any()


def test_a_covariance_of_0_fills_no_share():
    # 8 of 10 tokens have the mean advantage; the share of 5 tokens is filled by the one whose covariance is above 0
    old = torch.tensor([-1.0, -2.0, *[-1.5] * 8])
    advantages = torch.tensor([1.0, -1.0, *[0.0] * 8])
    found = largest_covariances(old, advantages, torch.ones(10, dtype=torch.bool), cov_fraction=0.5)
    assert found.tolist() == [True, True, *[False] * 8]


def test_the_penalty_has_no_gradient_where_rounding_decides_its_sign():
    log_ratio = torch.tensor([1e-6, -1e-6, 9e-5, 2e-4, -2e-4], dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(5, dtype=torch.float64)
    loss, _ = kl_cov(log_ratio, zeros, zeros, torch.ones(5, dtype=torch.bool), cov_kl_coef=3.0)
    assert loss.tolist() == pytest.approx([3e-6, 3e-6, 2.7e-4, 6e-4, 6e-4], abs=1e-15)
    assert gradient(loss, log_ratio).tolist() == [0.0, 0.0, 0.0, 3.0, -3.0]


@pytest.mark.parametrize(
    "fraction, low, high, selected",
    [
        (0.4, 0.5, 1.5, [True, True, False, False, False, False]),  # the largest are above the band
        (0.2, 0.0, 0.5, [False, False, False, False, False, True]),
        (1.0, 1.0, 2.0, [True, True, False, True, True, False]),  # both bounds belong to the band
        (1.0, 3.0, 4.0, [False] * 6),  # nothing in the band
        (0.4, -9.0, 9.0, [False, False, False, True, True, False]),
    ],
)
def test_covariances_in_a_band_by_hand(fraction, low, high, selected):
    found = covariances_in_band(*step(FIVE), cov_fraction=fraction, cov_low=low, cov_high=high)
    assert found.tolist() == selected


@pytest.mark.parametrize("fraction", [1e-9, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("band", [None, (-0.5, 1.0), (0.25, 50.0)])
@seeded
@given(rows=STEPS)
def test_selected_tokens_equal_the_slow_reference(fraction, band, rows):
    old, advantages, mask = step(rows)
    cov = covariances(old, advantages, mask).tolist()
    low, high = band or (1e-9, math.inf)  # without a band: above 0
    inside = sorted((c for c, (_, _, m) in zip(cov, rows, strict=True) if m and low <= c <= high), reverse=True)
    # a step's share of all its trainable tokens, not of those in the band
    count = min(max(math.floor(fraction * sum(m for _, _, m in rows)), 1), len(inside))
    last = inside[count - 1] if count else math.inf
    expected = [m and low <= c <= high and c >= last for c, (_, _, m) in zip(cov, rows, strict=True)]
    if band is None:
        found = largest_covariances(old, advantages, mask, cov_fraction=fraction)
    else:
        found = covariances_in_band(old, advantages, mask, cov_fraction=fraction, cov_low=low, cov_high=high)
    assert found.dtype == torch.bool
    assert found.tolist() == expected


def selections():
    largest = pytest.param(lambda *t: largest_covariances(*t, cov_fraction=0.4), id="largest")
    in_band = pytest.param(lambda *t: covariances_in_band(*t, cov_fraction=0.4, cov_low=-1, cov_high=1.5), id="band")
    return pytest.mark.parametrize("select", [largest, in_band])


@selections()
@pytest.mark.parametrize("planted", [math.nan, math.inf, -math.inf, 1e300])
def test_what_stands_in_masked_slots_selects_nothing_else(select, planted):
    assert select(*step(FIVE, planted=planted)).tolist() == select(*step(FIVE)).tolist()


@selections()
@seeded
@given(rows=STEPS, data=st.data())
def test_the_selection_does_not_depend_on_the_order_of_tokens(select, rows, data):
    order = data.draw(st.permutations(range(len(rows))))
    whole, shuffled = select(*step(rows)), select(*step([rows[i] for i in order]))
    # the means are sums in another order: eighths are exact, and so is a division of equal numbers
    assert shuffled.tolist() == whole[torch.tensor(order)].tolist()


@selections()
def test_a_step_without_trainable_tokens_selects_none(select):
    assert select(*step([(x, a, False) for x, a, _ in FIVE])).tolist() == [False] * 6
    assert select(*step([])).tolist() == []


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1, math.nan])
def test_a_share_out_of_range_is_refused(fraction):
    with pytest.raises(ValueError, match="cov_fraction must be in"):
        largest_covariances(*step(FIVE), cov_fraction=fraction)
    with pytest.raises(ValueError, match="cov_fraction must be in"):
        covariances_in_band(*step(FIVE), cov_fraction=fraction, cov_low=0.0, cov_high=1.0)


def test_covariances_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match="must share a shape"):
        covariances(torch.zeros(3), torch.zeros(1), torch.ones(3, dtype=torch.bool))


# ---- the losses ------------------------------------------------------------------------------------------------------

RATIOS = [2.0, 0.5, 1.1, 2.0, 0.9]
ADVANTAGES = [1.0, -2.0, -1.0, 1.0, 0.5]
SELECTED = torch.tensor([True, True, True, False, False])


def triple():
    logprobs = leaf([-1.0] * 5)
    return logprobs, logprobs.detach() - torch.tensor(RATIOS, dtype=F64).log(), torch.tensor(ADVANTAGES, dtype=F64)


def test_clip_cov_by_hand():
    # eps .2: the fourth is clipped at -1.2, the fifth is inside, -.45; those selected have neither value nor gradient
    tokens = triple()
    loss, clipped = clip_cov(*tokens, SELECTED, eps_clip=0.2)
    assert loss.tolist() == pytest.approx([0.0, 0.0, 0.0, -1.2, -0.45], abs=1e-12)
    assert gradient(loss, tokens[0]).tolist() == pytest.approx([0.0, 0.0, 0.0, 0.0, -0.45], abs=1e-12)
    assert clipped.tolist() == [True, True, True, True, False]


def test_kl_cov_by_hand():
    # -A r + 3 |ln r|: -2 + 3 x .693147 = .079442; 1 + .3 x 6.93147 = 3.079442; 1.1 + 3 x .0953102 = 1.385931; -2; -.45
    # gradient -A r + 3 sign(ln r): 1; 1 - 3 = -2; 1.1 + 3 = 4.1; -2; -.45
    tokens = triple()
    loss, clipped = kl_cov(*tokens, SELECTED, cov_kl_coef=3.0)
    assert loss.tolist() == pytest.approx([0.079442, 3.079442, 1.385931, -2.0, -0.45], abs=1e-6)
    assert gradient(loss, tokens[0]).tolist() == pytest.approx([1.0, -2.0, 4.1, -2.0, -0.45], abs=1e-12)
    assert clipped.tolist() == SELECTED.tolist()


TOKENS = st.lists(
    st.tuples(st.floats(-8, -0.01), st.floats(-3, 3), st.integers(-128, 128).map(lambda x: x / 64), st.booleans()),
    min_size=1,
    max_size=12,
)


def of_tokens(rows):
    logprobs = leaf([x for x, *_ in rows])
    old = torch.tensor([x - d for x, d, *_ in rows], dtype=F64)
    return logprobs, old, torch.tensor([row[2] for row in rows], dtype=F64), torch.tensor([row[3] for row in rows])


@seeded
@given(TOKENS)
def test_the_losses_equal_the_slow_reference(rows):
    logprobs, old, advantages, selected = of_tokens(rows)
    clip, kl = (
        clip_cov(logprobs, old, advantages, selected, eps_clip=0.3, eps_clip_high=0.6),
        kl_cov(logprobs, old, advantages, selected, cov_kl_coef=0.7),
    )
    slopes = gradient(clip.loss, logprobs), gradient(kl.loss, logprobs)
    for i, (x, _, advantage, is_selected) in enumerate(rows):
        log_ratio = x - old[i].item()
        ratio = math.exp(log_ratio)
        is_cut = (advantage > 0 and ratio > 1.6) or (advantage < 0 and ratio < 0.7)
        value = 0.0 if is_selected else -advantage * (min(max(ratio, 0.7), 1.6) if is_cut else ratio)
        held = 0.7 * is_selected
        assert clip.loss[i].item() == pytest.approx(value, rel=1e-11, abs=1e-11)
        assert kl.loss[i].item() == pytest.approx(-advantage * ratio + held * abs(log_ratio), rel=1e-11, abs=1e-11)
        assert kl.clipped[i].item() == is_selected
        if min(abs(ratio - 0.7), abs(ratio - 1.6), abs(abs(log_ratio) - 1e-4)) > 1e-9:  # a kink has two slopes
            slope = 0.0 if is_selected or is_cut else value
            assert slopes[0][i].item() == pytest.approx(slope, rel=1e-11, abs=1e-11)
            assert clip.clipped[i].item() == (is_selected or is_cut)
            pull = -advantage * ratio + (math.copysign(held, log_ratio) if abs(log_ratio) > 1e-4 else 0.0)
            assert slopes[1][i].item() == pytest.approx(pull, rel=1e-11, abs=1e-11)


@seeded
@given(TOKENS)
def test_where_nothing_is_selected_they_are_ppo_clip_and_importance_sampling(rows):
    logprobs, old, advantages, selected = of_tokens(rows)
    none = torch.zeros_like(selected)
    clip = clip_cov(logprobs, old, advantages, none, eps_clip=0.2)
    expected = ppo_clip(logprobs, old, advantages, eps_clip=0.2)
    assert torch.equal(clip.loss, expected.loss)
    assert torch.equal(clip.clipped, expected.clipped)
    plain = importance_sampling(logprobs, old, advantages).loss
    assert torch.equal(kl_cov(logprobs, old, advantages, none, cov_kl_coef=1.0).loss, plain)
    assert torch.equal(kl_cov(logprobs, old, advantages, selected, cov_kl_coef=0.0).loss, plain)


def test_gradcheck_away_from_kinks():
    # ratios .5, .9, 1.1, 1.5 for bounds at .7 and 1.3, none at 1, where |log r| has its kink
    old = torch.full((8,), -1.0, dtype=F64)
    logprobs = (old + torch.tensor([0.5, 0.9, 1.1, 1.5] * 2, dtype=F64).log()).requires_grad_()
    advantages = torch.tensor([1.5] * 4 + [-0.7] * 4, dtype=F64)
    selected = torch.tensor([True, True, False, False] * 2)
    assert torch.autograd.gradcheck(lambda x: clip_cov(x, old, advantages, selected, eps_clip=0.3).loss, (logprobs,))
    assert torch.autograd.gradcheck(lambda x: kl_cov(x, old, advantages, selected, cov_kl_coef=2.0).loss, (logprobs,))


@pytest.mark.parametrize("selected", [True, False])
def test_on_policy_kl_cov_has_the_gradient_of_reinforce(selected):
    # |log r| has slope 0 at its kink
    logprobs = leaf([-0.1, -2.0])
    advantages, chosen = torch.tensor([1.0, -0.5], dtype=F64), torch.tensor([selected] * 2)
    loss = kl_cov(logprobs, logprobs.detach(), advantages, chosen, cov_kl_coef=5.0).loss
    assert gradient(loss, logprobs).tolist() == [-1.0, 0.5]


@pytest.mark.parametrize("spoiled", [0, 1, 2])
def test_a_nan_is_not_hidden_where_nothing_is_selected(spoiled):
    arguments = [torch.tensor([-1.0, -1.0]) for _ in range(3)]
    arguments[spoiled][1] = math.nan
    none = torch.zeros(2, dtype=torch.bool)
    assert clip_cov(*arguments, none, eps_clip=0.2).loss.isnan().tolist() == [False, True]
    assert kl_cov(*arguments, none, cov_kl_coef=1.0).loss.isnan().tolist() == [False, True]


@pytest.mark.parametrize("log_ratio", [-1e4, -89.0, 89.0, 1e4])
@pytest.mark.parametrize("selected", [True, False])
def test_extreme_log_ratios_give_finite_loss_and_gradient_in_float32(log_ratio, selected):
    logprobs = torch.tensor([-1.0], requires_grad=True)
    arguments = logprobs, torch.tensor([-1.0 - log_ratio]), torch.tensor([-1.0]), torch.tensor([selected])
    for loss in (clip_cov(*arguments, eps_clip=1.0).loss, kl_cov(*arguments, cov_kl_coef=1.0).loss):
        assert loss.isfinite().all()
        assert gradient(loss, logprobs).isfinite().all()


@pytest.mark.parametrize("coef", [-0.1, math.nan])
def test_a_negative_coefficient_is_refused(coef):
    with pytest.raises(ValueError, match="cov_kl_coef must be >= 0"):
        kl_cov(*triple(), SELECTED, cov_kl_coef=coef)


def test_shapes_that_differ_are_refused_not_broadcast():
    for call in (lambda *t: clip_cov(*t, eps_clip=0.2), lambda *t: kl_cov(*t, cov_kl_coef=1.0)):
        with pytest.raises(ValueError, match="must share a shape"):
            call(torch.zeros(3), torch.zeros(3), torch.zeros(1), torch.zeros(3, dtype=torch.bool))


@pytest.mark.parametrize("call", [lambda *t: clip_cov(*t, eps_clip=0.2), lambda *t: kl_cov(*t, cov_kl_coef=1.0)])
def test_a_selection_of_another_shape_is_refused_not_broadcast(call):
    with pytest.raises(ValueError, match="must share a shape"):
        call(torch.zeros(3), torch.zeros(3), torch.zeros(3), torch.zeros(1, dtype=torch.bool))
