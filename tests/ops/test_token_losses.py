"""SAPO, REINFORCE, importance sampling, DPPO and ASPO: losses of single tokens, against one token at a time in floats."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.ops import cispo, ppo_clip
from strop.ops.policy_loss import aspo, dppo, importance_sampling, reinforce, sapo

F64 = torch.float64
seeded = settings(derandomize=True, deadline=None, max_examples=60)
# (logprob, log-ratio, advantage); the advantage on a grid, so that a product with one is 0 only where it is
SAMPLES = st.lists(
    st.tuples(st.floats(-8, -0.01), st.floats(-3, 3), st.integers(-128, 128).map(lambda x: x / 64)),
    min_size=1,
    max_size=12,
)
ASPO = {"eps_clip": 0.2, "eps_clip_high": 0.28, "max_weight": 3.0}
CALLS = {
    "sapo": lambda *t: sapo(*t, tau_pos=1.0, tau_neg=1.05),
    "reinforce": lambda x, _, a: reinforce(x, a),
    "importance_sampling": importance_sampling,
    "dppo tv": lambda *t: dppo(*t, divergence="tv", max_divergence=0.15),
    "dppo kl": lambda *t: dppo(*t, divergence="kl", max_divergence=0.05),
    "aspo": lambda *t: aspo(*t, **ASPO),
}
every_loss = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def leaf(values, dtype=F64):
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def tensors(sample):
    return (
        leaf([x for x, _, _ in sample]),
        torch.tensor([x - d for x, d, _ in sample], dtype=F64),
        torch.tensor([a for _, _, a in sample], dtype=F64),
    )


def of_probabilities(new, old, advantages):
    return leaf([math.log(p) for p in new]), torch.tensor(old, dtype=F64).log(), torch.tensor(advantages, dtype=F64)


def gradient(loss, logprobs):
    return torch.autograd.grad(loss.sum(), logprobs)[0]


def agrees(call, sample, slow, *, edges=()):
    """Loss, gradient and `clipped` of each token are those of `slow(logprob, log_ratio, advantage)`; a token is let off
    where one of `edges(...)` is within 1e-9: there the two sides of a bound have different slopes."""
    logprobs, old, advantages = tensors(sample)
    loss, clipped = call(logprobs, old, advantages)
    slopes = gradient(loss, logprobs)
    for i, (x, _, advantage) in enumerate(sample):
        log_ratio = x - old[i].item()
        if edges and any(abs(distance) < 1e-9 for distance in edges(x, log_ratio, advantage)):
            continue
        value, slope, is_clipped = slow(x, log_ratio, advantage)
        assert loss[i].item() == pytest.approx(value, rel=1e-11, abs=1e-11)
        assert slopes[i].item() == pytest.approx(slope, rel=1e-11, abs=1e-11)
        assert clipped[i].item() == is_clipped


# ---- REINFORCE and importance sampling -------------------------------------------------------------------------------


def test_reinforce_by_hand():
    # -A logprob: -2 x -.5 = 1; -(-1) x -2 = -2; gradient -A
    logprobs = leaf([-0.5, -2.0])
    loss, clipped = reinforce(logprobs, torch.tensor([2.0, -1.0], dtype=F64))
    assert loss.tolist() == [1.0, -2.0]
    assert clipped.tolist() == [False, False]
    assert gradient(loss, logprobs).tolist() == [-2.0, 1.0]


def test_importance_sampling_by_hand():
    # r = .6 / .3 = 2, A = -3: 6; r = .1 / .4 = .25, A = 2: -.5; gradient = loss, since r is its own derivative
    logprobs, old, advantages = of_probabilities([0.6, 0.1], [0.3, 0.4], [-3.0, 2.0])
    loss, clipped = importance_sampling(logprobs, old, advantages)
    assert loss.tolist() == pytest.approx([6.0, -0.5], abs=1e-12)
    assert gradient(loss, logprobs).tolist() == pytest.approx([6.0, -0.5], abs=1e-12)
    assert clipped.tolist() == [False, False]


@seeded
@given(SAMPLES)
def test_reinforce_and_importance_sampling_equal_the_slow_reference(sample):
    agrees(CALLS["reinforce"], sample, lambda x, d, a: (-a * x, -a, False))
    agrees(importance_sampling, sample, lambda x, d, a: (-a * math.exp(d), -a * math.exp(d), False))


@seeded
@given(SAMPLES)
def test_importance_sampling_is_ppo_clip_without_a_clip(sample):
    logprobs, old, advantages = tensors(sample)
    loss = importance_sampling(logprobs, old, advantages).loss
    unclipped = ppo_clip(logprobs, old, advantages, eps_clip=1.0, eps_clip_high=math.inf).loss
    assert torch.equal(loss, unclipped)
    assert torch.equal(gradient(loss, logprobs), gradient(unclipped, logprobs))


# ---- SAPO ------------------------------------------------------------------------------------------------------------


def test_sapo_by_hand():
    # A = 1, r = 2, tau 1: p = 1 / (1 + e^-1) = .7310586; loss -4 x .7310586 = -2.924234; gradient
    # -4 x .7310586 x .2689414 x 2 = -1.572896
    # A = -2, r = .5, tau 2: p = 1 / (1 + e^1) = .2689414; loss 2 x 2 x .2689414 = 1.075766; gradient
    # 2 x 4 x .2689414 x .7310586 x .5 = .786448
    logprobs, old, advantages = of_probabilities([0.8, 0.2], [0.4, 0.4], [1.0, -2.0])
    loss, clipped = sapo(logprobs, old, advantages, tau_pos=1.0, tau_neg=2.0)
    assert loss.tolist() == pytest.approx([-2.924234, 1.075766], abs=1e-6)
    assert gradient(loss, logprobs).tolist() == pytest.approx([-1.572896, 0.786448], abs=1e-6)
    assert clipped.tolist() == [False, False]


@pytest.mark.parametrize("tau_pos, tau_neg", [(1.0, 1.05), (0.3, 7.0)])
@seeded
@given(sample=SAMPLES)
def test_sapo_equals_the_slow_reference(tau_pos, tau_neg, sample):
    def slow(_, log_ratio, advantage):
        tau = tau_pos if advantage > 0 else tau_neg
        z = tau * (math.exp(log_ratio) - 1)
        # the gate as a hyperbolic tangent: sigmoid(z) = (1 + tanh(z / 2)) / 2, its slope 1 / (2 cosh(z / 2))^2
        value = -advantage * 2 * (1 + math.tanh(z / 2)) / tau
        return value, -advantage * math.exp(log_ratio) / math.cosh(z / 2) ** 2, False

    agrees(lambda *t: sapo(*t, tau_pos=tau_pos, tau_neg=tau_neg), sample, slow)


def test_a_temperature_of_sapo_is_not_rounded_to_float32():
    # 1.05 in float32 is 1.0499999523: an error of 4.5e-8 in a float64 loss. On-policy the loss is -A 2 / tau.
    zero = torch.zeros(2, dtype=F64)
    loss = sapo(zero, zero, torch.tensor([1.0, -1.0], dtype=F64), tau_pos=1.1, tau_neg=1.05).loss
    assert loss.tolist() == pytest.approx([-2 / 1.1, 2 / 1.05], abs=1e-15)


def test_a_gate_that_never_closes_has_the_gradient_of_importance_sampling():
    # the gate's slope is 1 - O(tau^2) there: 1e-4 squared
    logprobs, old, advantages = tensors([(-1.0, 0.5, 1.0), (-2.0, -1.0, -0.7), (-0.5, 1.2, -1.0)])
    slopes = gradient(sapo(logprobs, old, advantages, tau_pos=1e-4, tau_neg=1e-4).loss, logprobs)
    expected = gradient(importance_sampling(logprobs, old, advantages).loss, logprobs)
    assert torch.allclose(slopes, expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("taus", [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, math.nan)])
def test_a_temperature_that_is_not_positive_is_refused(taus):
    with pytest.raises(ValueError, match="tau_pos and tau_neg must be > 0"):
        sapo(*[torch.zeros(1)] * 3, tau_pos=taus[0], tau_neg=taus[1])


# ---- DPPO ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "p, q, advantage, weight",
    [
        (0.8, 0.5, 1.0, 0.0),  # rose by .3 > .15 where it should rise
        (0.8, 0.5, -1.0, 1.6),  # rose where it should fall: let through, weight .8 / .5
        (0.2, 0.5, -1.0, 0.0),  # fell by .3 where it should fall
        (0.2, 0.5, 1.0, 0.4),
        (0.02, 0.01, 1.0, 2.0),  # a ratio of 2, but a move of .01: PPO would clip it
        (0.12, 0.001, 1.0, 20.0),  # a move of .119; its weight of 120 is cut at 20
    ],
)
def test_dppo_total_variation_by_hand(p, q, advantage, weight):
    logprobs, old, advantages = of_probabilities([p], [q], [advantage])
    loss, clipped = dppo(logprobs, old, advantages, divergence="tv", max_divergence=0.15)
    assert clipped.item() == (weight == 0)
    assert gradient(loss, logprobs).item() == pytest.approx(-weight * advantage, abs=1e-12)
    assert loss.item() == pytest.approx(-weight * advantage * math.log(p), abs=1e-12)


@pytest.mark.parametrize("bound, is_clipped", [(0.19, True), (0.2, False)])
def test_dppo_kl_by_hand(bound, is_clipped):
    # q = .5, p = .8: .5 ln(.5 / .8) + .5 ln(.5 / .2) = -.235002 + .458145 = .223144 (turned round it is .192745, below .22)
    logprobs, old, advantages = of_probabilities([0.8], [0.5], [1.0])
    assert dppo(logprobs, old, advantages, divergence="kl", max_divergence=0.22).clipped.item()
    assert not dppo(logprobs, old, advantages, divergence="kl", max_divergence=0.225).clipped.item()
    # q = .8, p = .5: .8 ln(.8 / .5) + .2 ln(.2 / .5) = .376003 - .183258 = .192745
    logprobs, old, advantages = of_probabilities([0.5], [0.8], [-1.0])
    assert dppo(logprobs, old, advantages, divergence="kl", max_divergence=bound).clipped.item() == is_clipped


def test_the_two_bounds_of_dppo_are_for_the_two_directions():
    # a rise of .2 and a fall of .2
    logprobs, old, advantages = of_probabilities([0.6, 0.4], [0.4, 0.6], [1.0, -1.0])
    clipped = {
        bounds: dppo(
            logprobs, old, advantages, divergence="tv", max_divergence=bounds[0], max_divergence_high=bounds[1]
        ).clipped.tolist()
        for bounds in ((0.3, 0.1), (0.1, 0.3), (0.1, None), (0.3, None))
    }
    assert clipped == {
        (0.3, 0.1): [True, False],
        (0.1, 0.3): [False, True],
        (0.1, None): [True, True],
        (0.3, None): [False, False],
    }


@pytest.mark.parametrize("divergence", ["tv", "kl"])
@pytest.mark.parametrize("bounds", [(0.15, 0.1, 20.0), (0.0, 0.5, 2.0)])
@seeded
@given(sample=st.lists(st.tuples(st.floats(-8, -3.01), st.floats(-3, 3), st.integers(-9, 9)), min_size=1, max_size=12))
def test_dppo_equals_the_slow_reference(divergence, bounds, sample):
    low, high, cap = bounds

    def distance(x, log_ratio):
        p, q = math.exp(x), math.exp(x - log_ratio)
        if divergence == "tv":
            return abs(p - q)
        return math.fsum([q * math.log(q / p), (1 - q) * math.log((1 - q) / (1 - p))])

    def slow(x, log_ratio, advantage):
        moved, weight = distance(x, log_ratio), min(math.exp(log_ratio), cap)
        if advantage > 0 and log_ratio > 0 and moved > high:
            weight = 0.0
        if advantage < 0 and log_ratio < 0 and moved > low:
            weight = 0.0
        return -weight * advantage * x, -weight * advantage, weight == 0.0

    def edges(x, log_ratio, _):
        moved = distance(x, log_ratio)
        return moved - low, moved - high, log_ratio

    call = dppo
    agrees(
        lambda *t: call(*t, divergence=divergence, max_divergence=low, max_divergence_high=high, max_ratio=cap),
        sample,
        slow,
        edges=edges,
    )


@seeded
@given(SAMPLES)
def test_without_bounds_dppo_is_cispo_without_bounds(sample):
    logprobs, old, advantages = tensors(sample)
    a = dppo(logprobs, old, advantages, divergence="tv", max_divergence=math.inf, max_ratio=math.inf)
    b = cispo(logprobs, old, advantages, eps_clip=1.0, eps_clip_high=math.inf)
    assert torch.equal(a.loss, b.loss)
    assert torch.equal(gradient(a.loss, logprobs), gradient(b.loss, logprobs))
    assert not a.clipped.any()


@pytest.mark.parametrize(
    "p, q, advantage, is_clipped",
    [
        (1.0, 0.01, 1.0, True),  # (1 - q) ln((1 - q) / 0): as far as can be
        (1e-12, 1.0, -1.0, True),  # 1 ln 1e12 = 27.6
        (1.0, 1.0, 1.0, False),
        (1e-30, 1e-30, -1.0, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_dppo_kl_knows_certain_and_impossible_tokens(p, q, advantage, is_clipped, dtype):
    logprobs, old = (torch.tensor([x], dtype=dtype).log() for x in (p, q))
    loss, clipped = dppo(logprobs, old, torch.tensor([advantage], dtype=dtype), divergence="kl", max_divergence=0.1)
    assert loss.isfinite().all()
    assert clipped.tolist() == [is_clipped]


@pytest.mark.parametrize(
    "bounds",
    [
        {"max_divergence": -0.1},
        {"max_divergence": math.nan},
        {"max_divergence": 0.1, "max_divergence_high": -0.1},
        {"max_divergence": 0.1, "max_ratio": 0.0},
        {"max_divergence": 0.1, "max_ratio": math.nan},
    ],
)
def test_a_bound_of_dppo_out_of_range_is_refused(bounds):
    with pytest.raises(ValueError, match="max_divergence and max_divergence_high must be >= 0 and max_ratio > 0"):
        dppo(*[torch.zeros(1)] * 3, divergence="tv", **bounds)


def test_a_divergence_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="divergence"):
        dppo(*[torch.zeros(1)] * 3, divergence="js", max_divergence=0.1)


@pytest.mark.parametrize("divergence, inside, outside", [("tv", 0.649, 0.651), ("kl", 0.653, 0.655)])
def test_without_a_bound_of_its_own_dppo_has_that_of_the_kind(divergence, inside, outside):
    # From q = .5, tv: .15 is at p = .65. kl: .5 ln(.25 / (p (1 - p))) = .05 at p (1 - p) = .25 e^-.1 = .226209,
    # p = .5 + sqrt(.25 - .226209) = .654243
    for p, is_clipped in ((inside, False), (outside, True)):
        found = dppo(*of_probabilities([p], [0.5], [1.0]), divergence=divergence)
        assert found.clipped.item() == is_clipped


# ---- ASPO ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ratio, advantage, weight, clipped",
    [
        (0.5, 1.0, 2.0, False),  # 1 / .5: the less likely, the more it is lifted
        (0.1, 1.0, 3.0, True),  # 1 / .1 = 10, cut at 3
        (1.25, 1.0, 0.8, False),  # inside 1.28
        (1.5, 1.0, 0.0, True),  # above 1.28: PPO would clip it
        (1.5, -1.0, 1.5, False),  # A < 0 keeps r, and has no upper bound
        (9.0, -1.0, 9.0, False),
        (0.7, -1.0, 0.0, True),  # below .8
        (0.7, 0.0, 0.7, False),
    ],
)
def test_aspo_by_hand(ratio, advantage, weight, clipped):
    logprobs, old, advantages = tensors([(-2.0, math.log(ratio), advantage)])
    found = aspo(logprobs, old, advantages, **ASPO)
    assert found.loss.item() == pytest.approx(2.0 * weight * advantage, abs=1e-12)  # -w A x -2
    assert gradient(found.loss, logprobs).item() == pytest.approx(-weight * advantage, abs=1e-12)
    assert found.clipped.item() == clipped


@pytest.mark.parametrize("bounds", [(0.2, 0.28, 3.0), (0.0, 0.0, 0.5), (0.9, 5.0, 100.0)])
@seeded
@given(sample=SAMPLES)
def test_aspo_equals_the_slow_reference(bounds, sample):
    low, high, cap = bounds

    def slow(x, log_ratio, advantage):
        ratio = math.exp(log_ratio)
        weight = min(math.exp(-log_ratio), cap) if advantage > 0 else ratio
        kept = ratio <= 1 + high if advantage > 0 else ratio >= 1 - low if advantage < 0 else True
        used = weight if kept else 0.0
        return -used * advantage * x, -used * advantage, not kept or (advantage > 0 and 1 / ratio > cap)

    def edges(_, log_ratio, advantage):
        ratio = math.exp(log_ratio)
        return ratio - 1 - high, ratio - 1 + low, 1 / ratio - cap

    agrees(lambda *t: aspo(*t, eps_clip=low, eps_clip_high=high, max_weight=cap), sample, slow, edges=edges)


@seeded
@given(SAMPLES)
def test_for_bad_tokens_the_gradient_of_aspo_is_that_of_ppo_clip_whatever_the_cut_of_its_weight(sample):
    logprobs, old, advantages = tensors([(x, d, -abs(a)) for x, d, a in sample])
    a = aspo(logprobs, old, advantages, eps_clip=0.2, eps_clip_high=0.28, max_weight=0.5)
    b = ppo_clip(logprobs, old, advantages, eps_clip=0.2, eps_clip_high=0.28)
    assert torch.equal(a.clipped, b.clipped)
    assert torch.allclose(gradient(a.loss, logprobs), gradient(b.loss, logprobs), rtol=1e-12, atol=0)


@pytest.mark.parametrize("max_weight", [0.0, -1.0, math.nan])
def test_a_weight_of_aspo_that_is_not_positive_is_refused(max_weight):
    with pytest.raises(ValueError, match="max_weight must be > 0"):
        aspo(*[torch.zeros(1)] * 3, eps_clip=0.2, eps_clip_high=0.2, max_weight=max_weight)


@pytest.mark.parametrize("band", [(-0.1, 0.2), (0.2, -0.1), (math.nan, 0.2), (0.2, math.nan)])
def test_a_band_of_aspo_that_is_no_distance_is_refused(band):
    with pytest.raises(ValueError, match="eps_clip"):
        aspo(*[torch.zeros(1)] * 3, eps_clip=band[0], eps_clip_high=band[1], max_weight=3.0)


# ---- what all of them share ------------------------------------------------------------------------------------------

# none within .03 of a bound: ratios .3, .67, 1.11, 1.65, 4.5 for .8, 1.28, 1/3 and 3; moves of the probabilities
# exp(-2) = .135 to .04, .09, .15, .22, .61 are .095, .045, .015, .09, .47 for .15, and KLs .06, .01, .001, .03, .8 for .05
AWAY = [(-2.0 + d, d, a) for a in (1.5, -0.7) for d in (-1.2, -0.4, 0.1, 0.5, 1.5)]


@pytest.mark.parametrize("name", ["sapo", "reinforce", "importance_sampling"])
def test_gradcheck(name):
    logprobs, old, advantages = tensors(AWAY)
    assert torch.autograd.gradcheck(lambda x: CALLS[name](x, old, advantages).loss, (logprobs,))


@pytest.mark.parametrize("name", ["dppo tv", "dppo kl", "aspo"])
def test_gradcheck_with_the_weight_held_constant(name):
    # Finite differences would also move the weight, so old_logprobs moves along: the ratio then stands still.
    logprobs, old, advantages = tensors(AWAY)
    gap = (logprobs - old).detach()
    assert torch.autograd.gradcheck(lambda x: CALLS[name](x, x - gap, advantages).loss, (logprobs,))


@every_loss
def test_on_policy_the_gradient_is_that_of_reinforce(call):
    logprobs = leaf([-0.1, -2.0, -7.0, -0.5])
    loss, clipped = call(logprobs, logprobs.detach(), torch.tensor([1.0, -0.5, 2.0, 0.0], dtype=F64))
    assert gradient(loss, logprobs).tolist() == pytest.approx([-1.0, 0.5, -2.0, 0.0], abs=1e-12)
    assert not clipped.any()


@every_loss
@seeded
@given(sample=SAMPLES, data=st.data())
def test_order_and_split_of_tokens_do_not_matter(call, sample, data):
    order = data.draw(st.permutations(range(len(sample))))
    cut = data.draw(st.integers(0, len(sample)))
    logprobs, old, advantages = tensors(sample)
    whole = call(logprobs, old, advantages).loss
    slopes = gradient(whole, logprobs)
    again = leaf(logprobs.detach()[order].tolist())
    shuffled = again, old[order], advantages[order]
    parts = [call(*(x[s] for x in shuffled)).loss for s in (slice(None, cut), slice(cut, None))]
    # elementwise arithmetic; vectorised and scalar exp may differ in the last bit
    assert torch.allclose(torch.cat(parts), whole[order], rtol=1e-13, atol=1e-300)
    assert torch.allclose(gradient(torch.cat(parts), again), slopes[order], rtol=1e-13, atol=1e-300)


@every_loss
@pytest.mark.parametrize("log_ratio", [-1e4, -89.0, 89.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_extreme_log_ratios_give_finite_loss_and_gradient_in_float32(call, log_ratio, advantage):
    logprobs, old = leaf([-1.0], torch.float32), torch.tensor([-1.0 - log_ratio])
    loss = call(logprobs, old, torch.tensor([advantage])).loss
    assert loss.isfinite().all()
    assert gradient(loss, logprobs).isfinite().all()


@every_loss
@pytest.mark.parametrize("spoiled", [0, 1, 2])
def test_a_nan_in_a_trainable_slot_is_not_hidden(call, spoiled):
    arguments = [torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0])]
    arguments[spoiled][1] = math.nan
    if call is CALLS["reinforce"] and spoiled == 1:
        return  # it has no old_logprobs
    assert call(*arguments).loss.isnan().tolist() == [False, True]


@every_loss
def test_gradient_flows_through_logprobs_alone(call):
    logprobs, old, advantages = leaf([-1.0, -2.0]), leaf([-1.1, -1.7]), leaf([1.0, -1.0])
    call(logprobs, old, advantages).loss.sum().backward()
    assert logprobs.grad is not None
    assert old.grad is None
    assert advantages.grad is None


@every_loss
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(call, dtype):
    triple = [torch.tensor(x).to(dtype) for x in ([-1.3, -0.7, -2.0], [-1.25, -1.7, -0.1], [0.3, -1.0, 2.0])]
    half = call(*triple).loss
    assert half.dtype == torch.float32
    assert torch.equal(half, call(*(x.float() for x in triple)).loss)


@every_loss
@pytest.mark.parametrize("shape", [(0,), (2, 3), ()])
def test_any_shape_is_kept(call, shape):
    found = call(torch.zeros(shape), torch.zeros(shape), torch.ones(shape))
    assert found.loss.shape == found.clipped.shape == shape


@every_loss
@pytest.mark.parametrize("shapes", [((3,), (3,), (2,)), ((3,), (3,), ()), ((2, 1), (2, 1), (1, 2)), ((3,), (1,), (3,))])
def test_different_shapes_are_refused_not_broadcast(call, shapes):
    if call is CALLS["reinforce"] and shapes[0] == shapes[2]:
        return  # it has no old_logprobs
    with pytest.raises(ValueError, match="must share a shape"):
        call(*(torch.zeros(shape) for shape in shapes))
