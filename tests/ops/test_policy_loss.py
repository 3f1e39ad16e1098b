"""PPO clip, dual clip and CISPO: values by hand, a slow reference of branches in place of min and max, limits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.ops import cispo, dual_clipped, ppo_clip

F64 = torch.float64
seeded = settings(derandomize=True, deadline=None, max_examples=60)

# One token: logprobs, log-ratio, advantage. Log-ratios stay inside the clamp at +-20, which has tests of its own.
tokens = st.tuples(
    st.floats(-8, -0.01),
    st.floats(-3, 3),
    st.floats(-3, 3),
)
samples = st.lists(tokens, min_size=1, max_size=12)


def leaf(values, dtype=F64):
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def tensors(sample):
    """logprobs with gradient, old_logprobs, advantages from (logprob, log-ratio, advantage) triples."""
    logprobs = leaf([x for x, _, _ in sample])
    old = torch.tensor([x - d for x, d, _ in sample], dtype=F64)
    return logprobs, old, torch.tensor([a for _, _, a in sample], dtype=F64)


def grads(loss, logprobs):
    return torch.autograd.grad(loss.sum(), logprobs)[0].tolist()


def slow_ppo(log_ratio, advantage, low, high, cap=math.inf):
    """(loss, gradient by logprob, clipped) of one token, case by case."""
    ratio = math.exp(log_ratio)
    if advantage > 0:
        if ratio > 1 + high:
            return -advantage * (1 + high), 0.0, True
        return -advantage * ratio, -advantage * ratio, False
    if advantage < 0:
        if ratio < 1 - low:
            return -advantage * (1 - low), 0.0, True
        if ratio > cap:
            return -advantage * cap, 0.0, False
        return -advantage * ratio, -advantage * ratio, False
    return 0.0, 0.0, False


# ---- PPO clip -------------------------------------------------------------------------------------------------------


def test_ppo_clip_by_hand():
    # A =  2, r = 2.0: min(2 * 2.0, 2 * 1.2) = 2.4          loss -2.4, the band decides, gradient 0
    # A = -2, r = 2.0: min(-4.0, -2.4) = -4.0 -> loss 4.0;  the cap 1.5 * 2 = 3.0 is smaller: loss 3.0, gradient 0
    # A =  2, r = 0.5: min(1.0, 1.6) = 1.0                  loss -1.0, gradient -A r = -1.0
    logprobs = leaf([math.log(2), math.log(2), math.log(0.5)])
    advantages = torch.tensor([2.0, -2.0, 2.0], dtype=F64)
    loss, clipped = ppo_clip(logprobs, torch.zeros(3, dtype=F64), advantages, eps_clip=0.2, eps_clip_c=1.5)
    assert loss.tolist() == pytest.approx([-2.4, 3.0, -1.0], abs=1e-12)
    assert clipped.tolist() == [True, False, False]
    assert grads(loss, logprobs) == pytest.approx([0.0, 0.0, -1.0], abs=1e-12)


@pytest.mark.parametrize(
    "ratio, advantage, loss, gradient",
    [
        (10.0, -1.0, 3.0, 0.0),  # -A r = 10 above the cap 3
        (2.0, -1.0, 2.0, 2.0),  # above the band, which never binds there for A < 0, and below the cap
        (10.0, 1.0, -1.2, 0.0),  # the cap never touches A > 0
    ],
)
def test_dual_clip_caps_only_negative_advantages(ratio, advantage, loss, gradient):
    logprobs = leaf([-1.0])
    old = torch.tensor([-1.0 - math.log(ratio)], dtype=F64)
    got, _ = ppo_clip(logprobs, old, torch.tensor([advantage], dtype=F64), eps_clip=0.2, eps_clip_c=3.0)
    assert got.item() == pytest.approx(loss, abs=1e-12)
    assert grads(got, logprobs) == pytest.approx([gradient], abs=1e-12)


@seeded
@given(samples, st.sampled_from([(0.2, 0.2), (0.2, 0.28), (0.1, 0.4), (0.0, 0.0)]), st.sampled_from([None, 1.5, 3.0]))
def test_ppo_clip_equals_the_slow_reference(sample, band, cap):
    low, high = band
    logprobs, old, advantages = tensors(sample)
    loss, clipped = ppo_clip(logprobs, old, advantages, eps_clip=low, eps_clip_high=high, eps_clip_c=cap)
    gradient = grads(loss, logprobs)
    for i, (x, _, advantage) in enumerate(sample):
        log_ratio = x - old[i].item()
        edges = (1 - low, 1 + high, cap or math.inf)
        value, slope, is_clipped = slow_ppo(log_ratio, advantage, low, high, cap or math.inf)
        assert loss[i].item() == pytest.approx(value, rel=1e-12, abs=1e-12)
        if all(abs(math.exp(log_ratio) - edge) > 1e-9 for edge in edges):  # at a kink either one-sided slope is right
            assert gradient[i] == pytest.approx(slope, rel=1e-12, abs=1e-12)
            assert clipped[i].item() == is_clipped or abs(advantage) < 1e-12


def test_ppo_clip_gradcheck_away_from_kinks():
    # ratios 0.61, 0.9, 1.11, 1.65, 4.5 with bounds 0.8, 1.2 and cap 3: none within 0.05 of a kink
    old = torch.full((10,), -1.0, dtype=F64)
    logprobs = (old + torch.tensor([-0.5, -0.1, 0.1, 0.5, 1.5] * 2, dtype=F64)).requires_grad_()
    advantages = torch.tensor([1.5] * 5 + [-0.7] * 5, dtype=F64)
    assert torch.autograd.gradcheck(
        lambda x: ppo_clip(x, old, advantages, eps_clip=0.2, eps_clip_c=3.0).loss, (logprobs,)
    )


@seeded
@given(samples)
def test_without_a_band_ppo_clip_is_importance_sampling(sample):
    logprobs, old, advantages = tensors(sample)
    loss, clipped = ppo_clip(logprobs, old, advantages, eps_clip=1.0, eps_clip_high=math.inf)
    expected = [-a * math.exp(x - o) for (x, _, a), o in zip(sample, old.tolist(), strict=True)]
    assert loss.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert grads(loss, logprobs) == pytest.approx(expected, rel=1e-12, abs=1e-12)  # d exp(x) = exp(x)
    assert not clipped.any()


@pytest.mark.parametrize("eps_clip", [0.0, 0.2])
@pytest.mark.parametrize("eps_clip_c", [None, 1.01])
def test_on_policy_ppo_clip_has_the_gradient_of_reinforce(eps_clip, eps_clip_c):
    logprobs = leaf([-0.1, -2.0, -7.0, -0.5])
    advantages = torch.tensor([1.0, -0.5, 2.0, 0.0], dtype=F64)
    loss, clipped = ppo_clip(logprobs, logprobs.detach(), advantages, eps_clip=eps_clip, eps_clip_c=eps_clip_c)
    assert grads(loss, logprobs) == [-1.0, 0.5, -2.0, 0.0]
    assert not clipped.any()


def test_eps_clip_high_none_means_eps_clip():
    logprobs, old, advantages = tensors([(-1.0, 0.5, 1.0), (-1.0, -0.5, -1.0)])
    loss, _ = ppo_clip(logprobs, old, advantages, eps_clip=0.3)
    assert loss.tolist() == pytest.approx([-1.3, 0.7], abs=1e-12)  # -1 * 1.3 and 1 * 0.7


def test_clip_higher_moves_the_upper_bound_alone():
    logprobs, old, advantages = tensors([(-1.0, 0.5, 1.0), (-1.0, -0.5, -1.0)])
    loss, _ = ppo_clip(logprobs, old, advantages, eps_clip=0.3, eps_clip_high=0.6)
    assert loss.tolist() == pytest.approx([-1.6, 0.7], abs=1e-12)


def test_a_difference_of_89_is_the_bound_with_finite_gradient():
    # exp(89) overflows float32. A = 1: the first token on-policy, loss -1; the second above 1.2, -1.2, gradient 0.
    logprobs = leaf([-1.0, -2.0], torch.float32)
    old = torch.tensor([-1.0, -91.0])
    loss, clipped = ppo_clip(logprobs, old, torch.ones(2), eps_clip=0.2)
    assert loss.tolist() == pytest.approx([-1.0, -1.2], abs=1e-6)
    assert clipped.tolist() == [False, True]
    assert grads(loss, logprobs) == [-1.0, 0.0]


def test_the_unmasked_token_of_an_overflowing_pair_is_untouched_when_the_other_is_selected_out():
    logprobs = leaf([-1.0, -2.0], torch.float32)
    old, mask = torch.tensor([-1.0, -91.0]), torch.tensor([True, False])
    loss, _ = ppo_clip(logprobs[mask], old[mask], torch.full((1,), 0.7), eps_clip=0.2)
    assert loss.item() == pytest.approx(-0.7)
    assert grads(loss, logprobs) == pytest.approx([-0.7, 0.0])


@pytest.mark.parametrize("log_ratio", [-1e4, -89.0, 89.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("call", [ppo_clip, cispo])
def test_extreme_log_ratios_give_finite_loss_and_gradient_in_float32(call, log_ratio, advantage):
    logprobs = leaf([-1.0], torch.float32)
    old = torch.tensor([-1.0 - log_ratio])
    loss, _ = call(logprobs, old, torch.tensor([advantage]), eps_clip=0.2, eps_clip_high=0.28)
    assert loss.isfinite().all()
    assert math.isfinite(grads(loss, logprobs)[0])


@pytest.mark.parametrize("spoiled", [0, 1, 2])
@pytest.mark.parametrize("call", [ppo_clip, cispo])
def test_a_nan_in_a_trainable_slot_is_not_hidden(call, spoiled):
    arguments = [torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0])]
    arguments[spoiled][1] = math.nan
    loss = call(*arguments, eps_clip=0.2, eps_clip_high=0.28).loss
    assert loss.isnan().tolist() == [False, True]


def test_a_nan_is_not_hidden_by_the_dual_clip_cap():
    for spoiled in range(3):
        arguments = [torch.tensor([-1.0]), torch.tensor([-1.0]), torch.tensor([-1.0])]
        arguments[spoiled][0] = math.nan
        assert ppo_clip(*arguments, eps_clip=0.2, eps_clip_c=3.0).loss.isnan().all()


# ---- dual_clipped ---------------------------------------------------------------------------------------------------


@seeded
@given(samples, st.sampled_from([1.5, 3.0]))
def test_dual_clipped_marks_exactly_the_tokens_whose_loss_the_cap_changes(sample, cap):
    logprobs, old, advantages = tensors(sample)
    without = ppo_clip(logprobs, old, advantages, eps_clip=0.2).loss
    capped = ppo_clip(logprobs, old, advantages, eps_clip=0.2, eps_clip_c=cap).loss
    marked = dual_clipped(logprobs, old, advantages, eps_clip_c=cap)
    assert marked.dtype == torch.bool
    assert not marked.requires_grad
    assert marked[without != capped].all()
    assert torch.allclose(without[~marked], capped[~marked], rtol=0, atol=0)
    # where it is marked the cap is below the loss; equal only where A is so small that the product rounds to the same
    assert ((without > capped) | (advantages.abs() < 1e-300))[marked].all()


def test_dual_clipped_by_hand():
    # caps at 2.5: r = 3, A = -1 is cut; r = 2 is not; r = 3, A = +1 is not; A = 0 is not
    ratio = torch.tensor([3.0, 2.0, 3.0, 3.0]).log()
    advantages = torch.tensor([-1.0, -1.0, 1.0, 0.0])
    assert dual_clipped(ratio, torch.zeros(4), advantages, eps_clip_c=2.5).tolist() == [True, False, False, False]


# ---- CISPO ----------------------------------------------------------------------------------------------------------

CISPO_ADVANTAGES = [1.0, -0.5, 2.0, -1.0]
CISPO_LOGPROBS = [-0.7, -1.2, -0.4, -2.1]


@pytest.mark.parametrize(
    "band, ratios, loss, gradient, clipped",
    [
        # weights 1, 1.14, 1.28, 0.8. loss = -w A logprob: .7; -(1.14)(-.5)(-1.2) = -.684; -(1.28)(2)(-.4) = 1.024;
        # -(.8)(-1)(-2.1) = -1.68. gradient = -w A: -1, .57, -2.56, .8
        (
            (0.2, 0.28),
            [1.0, 1.14, 1.56, 0.4],
            [0.7, -0.684, 1.024, -1.68],
            [-1.0, 0.57, -2.56, 0.8],
            [False, False, True, True],
        ),
        # weights 1, 3, 5, 0.4, no lower bound. loss: .7; -3(-.5)(-1.2) = -1.8; -5(2)(-.4) = 4; -.4(-1)(-2.1) = -.84
        (
            (1.0, 4.0),
            [1.0, 3.0, 9.0, 0.4],
            [0.7, -1.8, 4.0, -0.84],
            [-1.0, 1.5, -10.0, 0.4],
            [False, False, True, False],
        ),
    ],
)
def test_cispo_by_hand(band, ratios, loss, gradient, clipped):
    logprobs = leaf(CISPO_LOGPROBS)
    old = torch.tensor([x - math.log(r) for x, r in zip(CISPO_LOGPROBS, ratios, strict=True)], dtype=F64)
    got = cispo(logprobs, old, torch.tensor(CISPO_ADVANTAGES, dtype=F64), eps_clip=band[0], eps_clip_high=band[1])
    assert got.loss.tolist() == pytest.approx(loss, abs=1e-12)
    assert got.clipped.tolist() == clipped
    assert grads(got.loss, logprobs) == pytest.approx(gradient, abs=1e-12)


@pytest.mark.parametrize("ratio, loss, gradient, clipped", [(1.5, 1.28, -1.28, True), (1.1, 1.1, -1.1, False)])
def test_cispo_keeps_the_gradient_of_a_clipped_token(ratio, loss, gradient, clipped):
    # A = 1, logprob -1, upper bound 1.28: the weight is min(r, 1.28); loss = weight, gradient = -weight
    logprobs = leaf([-1.0])
    got = cispo(logprobs, leaf([-1.0 - math.log(ratio)]), leaf([1.0]), eps_clip=1.0, eps_clip_high=0.28)
    assert got.loss.item() == pytest.approx(loss, abs=1e-12)
    assert got.clipped.tolist() == [clipped]
    assert grads(got.loss, logprobs) == pytest.approx([gradient], abs=1e-12)


@seeded
@given(samples, st.sampled_from([(0.2, 0.28), (1.0, 4.0), (1.0, 0.28), (3.0, 0.0)]))
def test_cispo_equals_the_slow_reference(sample, band):
    low, high = band
    logprobs, old, advantages = tensors(sample)
    loss, clipped = cispo(logprobs, old, advantages, eps_clip=low, eps_clip_high=high)
    gradient = grads(loss, logprobs)
    for i, (x, _, advantage) in enumerate(sample):
        ratio = math.exp(x - old[i].item())
        weight = 1 + high if ratio > 1 + high else 1 - low if ratio < 1 - low else ratio
        assert gradient[i] == pytest.approx(-weight * advantage, rel=1e-12, abs=1e-12)
        assert loss[i].item() == pytest.approx(-weight * advantage * x, rel=1e-12, abs=1e-12)
        if abs(ratio - 1 - high) > 1e-9 and abs(ratio - 1 + low) > 1e-9:
            assert clipped[i].item() == (ratio > 1 + high or ratio < 1 - low)


def test_cispo_gradcheck_with_the_weight_held_constant():
    # Finite differences would also move the weight, so old_logprobs moves along: the ratio then stands still.
    gap = torch.tensor([-0.7, 0.0, 0.1, 0.9], dtype=F64)
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.0], dtype=F64)
    assert torch.autograd.gradcheck(
        lambda x: cispo(x, x - gap, advantages, eps_clip=0.2, eps_clip_high=0.28).loss, (leaf(CISPO_LOGPROBS),)
    )


@pytest.mark.parametrize("band", [(0.2, 0.28), (1.0, 4.0), (0.0, 0.0)])
def test_on_policy_cispo_is_reinforce(band):
    logprobs = leaf(CISPO_LOGPROBS)
    advantages = torch.tensor(CISPO_ADVANTAGES, dtype=F64)
    loss, clipped = cispo(logprobs, logprobs.detach(), advantages, eps_clip=band[0], eps_clip_high=band[1])
    assert grads(loss, logprobs) == [-1.0, 0.5, -2.0, 1.0]
    assert loss.tolist() == pytest.approx([0.7, -0.6, 0.8, -2.1], abs=1e-12)
    assert not clipped.any()


# ---- what all of them share -----------------------------------------------------------------------------------------

LOSSES = [
    pytest.param(lambda *t: ppo_clip(*t, eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=3.0).loss, id="ppo_clip"),
    pytest.param(lambda *t: cispo(*t, eps_clip=0.2, eps_clip_high=0.28).loss, id="cispo"),
]


@pytest.mark.parametrize("loss_of", LOSSES)
@seeded
@given(sample=samples, data=st.data())
def test_order_and_split_of_tokens_do_not_matter(loss_of, sample, data):
    order = data.draw(st.permutations(range(len(sample))))
    cut = data.draw(st.integers(0, len(sample)))
    logprobs, old, advantages = tensors(sample)
    whole = loss_of(logprobs, old, advantages)
    gradient = torch.autograd.grad(whole.sum(), logprobs)[0]
    again, old2, advantages2 = (x.detach()[order] for x in (logprobs, old, advantages))
    again.requires_grad_()
    parts = [loss_of(again[s], old2[s], advantages2[s]) for s in (slice(None, cut), slice(cut, None))]
    # elementwise arithmetic; vectorised and scalar exp may differ in the last bit
    assert torch.allclose(torch.cat(parts), whole[order], rtol=1e-14, atol=0)
    sum(part.sum() for part in parts).backward()
    assert torch.allclose(again.grad, gradient[order], rtol=1e-14, atol=0)


@pytest.mark.parametrize("loss_of", LOSSES)
def test_gradient_flows_through_logprobs_alone(loss_of):
    logprobs, old, advantages = leaf([-1.0, -2.0]), leaf([-1.1, -1.7]), leaf([1.0, -1.0])
    loss_of(logprobs, old, advantages).sum().backward()
    assert logprobs.grad is not None
    assert old.grad is None
    assert advantages.grad is None


@pytest.mark.parametrize("loss_of", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(loss_of, dtype):
    triple = [torch.tensor(x).to(dtype) for x in ([-1.3, -0.7, -2.0], [-1.25, -1.7, -0.1], [0.3, -1.0, 2.0])]
    half = loss_of(*triple)
    assert half.dtype == torch.float32
    assert torch.equal(half, loss_of(*(x.float() for x in triple)))


@pytest.mark.parametrize("loss_of", LOSSES)
def test_float64_stays_float64(loss_of):
    assert loss_of(*tensors([(-1.0, 0.1, 1.0)])).dtype == F64


@pytest.mark.parametrize("loss_of", LOSSES)
def test_arguments_are_left_as_they_were(loss_of):
    logprobs, old, advantages = tensors([(-1.0, 0.5, -1.0), (-2.0, 3.0, 2.0)])
    before = [x.detach().clone() for x in (logprobs, old, advantages)]
    loss_of(logprobs, old, advantages).sum().backward()
    assert all(torch.equal(x.detach(), y) for x, y in zip((logprobs, old, advantages), before, strict=True))


@pytest.mark.parametrize("loss_of", LOSSES)
@pytest.mark.parametrize("shape", [(0,), (2, 3), ()])
def test_any_shape_is_kept(loss_of, shape):
    assert loss_of(torch.zeros(shape), torch.zeros(shape), torch.ones(shape)).shape == shape


@pytest.mark.parametrize("shapes", [((3,), (2,), (3,)), ((3,), (3,), (2,)), ((3,), (3,), ()), ((2, 1), (2, 1), (1, 2))])
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda *t: ppo_clip(*t, eps_clip=0.2), id="ppo_clip"),
        pytest.param(lambda *t: cispo(*t, eps_clip=1.0, eps_clip_high=4.0), id="cispo"),
        pytest.param(lambda *t: dual_clipped(*t, eps_clip_c=3.0), id="dual_clipped"),
    ],
)
def test_different_shapes_are_refused_not_broadcast(call, shapes):
    with pytest.raises(ValueError, match="must share a shape"):
        call(*(torch.zeros(shape) for shape in shapes))


@pytest.mark.parametrize("cap", [1.0, 0.5, -3.0, math.nan])
def test_a_dual_clip_cap_of_at_most_1_is_refused(cap):
    triple = [torch.zeros(1)] * 3
    with pytest.raises(ValueError, match="eps_clip_c must be > 1"):
        ppo_clip(*triple, eps_clip=0.2, eps_clip_c=cap)
    with pytest.raises(ValueError, match="eps_clip_c must be > 1"):
        dual_clipped(*triple, eps_clip_c=cap)


@pytest.mark.parametrize("band", [(-0.1, 0.2), (0.2, -0.1), (math.nan, 0.2), (0.2, math.nan)])
@pytest.mark.parametrize("call", [ppo_clip, cispo])
def test_a_bound_that_is_no_distance_is_refused(call, band):
    with pytest.raises(ValueError, match="eps_clip"):
        call(*[torch.zeros(1)] * 3, eps_clip=band[0], eps_clip_high=band[1])
