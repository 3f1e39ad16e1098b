"""Estimators of KL(policy || reference)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.ops import kl_estimate

F64 = torch.float64
KINDS = ["k1", "k2", "k3"]
seeded = settings(derandomize=True, deadline=None, max_examples=60)


def slow(d, kind):
    """(value, gradient) by power series or product, one token."""
    if kind == "k1":
        return d, 1.0
    if kind == "k2":
        return 0.5 * d * d, d
    # e^-d - 1 + d = d^2/2 - d^3/6 + d^4/24 - ...
    term, value, n = 1.0, 0.0, 0
    while n < 200:
        n += 1
        term *= -d / n
        if n >= 2:
            value += term
    return value, 1 - math.exp(-d)


def test_by_hand():
    # d = logprob - ref = 0, ln 2, -ln 2
    # k1: 0, .6931, -.6931     k2: 0, .2402, .2402     k3: 0, 1/2 + ln 2 - 1 = .1931, 2 - ln 2 - 1 = .3069
    logprobs = torch.tensor([-1.0, -1.0, -1.0 - math.log(2)], dtype=F64)
    ref = torch.tensor([-1.0, -1.0 - math.log(2), -1.0], dtype=F64)
    expected = {"k1": [0, 0.6931, -0.6931], "k2": [0, 0.2402, 0.2402], "k3": [0, 0.1931, 0.3069]}
    for kind in KINDS:
        assert kl_estimate(logprobs, ref, kind=kind).tolist() == pytest.approx(expected[kind], abs=5e-5)


@pytest.mark.parametrize("kind", KINDS)
@seeded
@given(pairs=st.lists(st.tuples(st.floats(-6, 0), st.floats(-6, 0)), min_size=1, max_size=8))
def test_equals_the_slow_reference(kind, pairs):
    logprobs = torch.tensor([x for x, _ in pairs], dtype=F64, requires_grad=True)
    kl = kl_estimate(logprobs, torch.tensor([y for _, y in pairs], dtype=F64), kind=kind)
    gradient = torch.autograd.grad(kl.sum(), logprobs)[0]
    for i, (x, y) in enumerate(pairs):
        value, slope = slow(x - y, kind)
        assert kl[i].item() == pytest.approx(value, rel=1e-9, abs=1e-12)  # the series cancels up to 1e-13 of e^6
        assert gradient[i].item() == pytest.approx(slope, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    logprobs = torch.tensor([-0.2, -1.5, -4.0, -9.0], dtype=F64, requires_grad=True)
    ref = torch.tensor([-1.0, -1.4, -0.5, -9.0], dtype=F64)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref, kind=kind), (logprobs,))


@pytest.mark.parametrize("kind", KINDS)
def test_equal_policies_give_exactly_zero(kind):
    logprobs = torch.tensor([-0.3, -7.0, 0.0, -100.0])
    assert kl_estimate(logprobs, logprobs.clone(), kind=kind).tolist() == [0.0] * 4


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_expectation_under_the_policy_is_the_kl(kind):
    # policy [.7,.2,.1], reference [.5,.25,.25]:
    # KL = .7 ln 1.4 + .2 ln .8 + .1 ln .4 = .23553 - .04463 - .09163 = .09927
    p, q = torch.tensor([0.7, 0.2, 0.1], dtype=F64), torch.tensor([0.5, 0.25, 0.25], dtype=F64)
    assert (p * kl_estimate(p.log(), q.log(), kind=kind)).sum().item() == pytest.approx(0.09927, abs=5e-6)


def test_on_policy_the_expected_gradient_is_that_of_the_kl_for_k2_and_zero_for_k1():
    # sum_v p_v d k(v) / d theta, with p = softmax(theta) held constant as the sampling weight
    theta = torch.tensor([0.3, -0.2, 0.9], dtype=F64, requires_grad=True)
    q = torch.tensor([0.5, 0.25, 0.25], dtype=F64)
    p = theta.softmax(0)
    true = torch.autograd.grad((p * (p / q).log()).sum(), theta, retain_graph=True)[0]
    found = {
        kind: torch.autograd.grad(
            (p.detach() * kl_estimate(p.log(), q.log(), kind=kind)).sum(), theta, retain_graph=True
        )
        for kind in ("k1", "k2")
    }
    assert torch.allclose(found["k2"][0], true, rtol=0, atol=1e-12)
    assert torch.allclose(found["k1"][0], torch.zeros(3, dtype=F64), rtol=0, atol=1e-12)


def test_k3_is_never_negative_in_float32():
    # exp(-d) + d - 1 cancels: for |d| < 3e-4 its rounding error (6e-8) is larger than its value (d^2 / 2)
    d = torch.linspace(-1e-3, 1e-3, 10001)
    assert kl_estimate(d, torch.zeros_like(d), kind="k3").min() >= 0


def test_k3_is_accurate_near_zero_in_float32():
    # d = 1e-3: d^2/2 - d^3/6 = 5e-7 - 1.67e-10 = 4.9983e-7; 1 per cent allows for no more than a few roundings of it
    d = torch.tensor([1e-3])
    assert kl_estimate(d, torch.zeros(1), kind="k3").item() == pytest.approx(4.9983e-7, rel=1e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", [-1e4, -89.0, 89.0, 1e4])
def test_extreme_differences_are_finite_in_float32(kind, d):
    logprobs = torch.tensor([d], requires_grad=True)
    kl = kl_estimate(logprobs, torch.zeros(1), kind=kind)
    kl.sum().backward()
    assert kl.isfinite().all()
    assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize("d", [-30.0, -25.0])
def test_k3_beyond_its_clamp_never_pushes_away_from_the_reference(d):
    # logprob far below the reference's: the KL falls as logprob rises, so the gradient must not be positive
    logprobs = torch.tensor([d], dtype=F64, requires_grad=True)
    kl_estimate(logprobs, torch.zeros(1, dtype=F64), kind="k3").sum().backward()
    assert logprobs.grad.item() <= 0


@pytest.mark.parametrize("kind", KINDS)
def test_only_logprobs_carries_gradient(kind):
    logprobs = torch.tensor([-1.0], requires_grad=True)
    ref = torch.tensor([-2.0], requires_grad=True)
    kl_estimate(logprobs, ref, kind=kind).sum().backward()
    assert ref.grad is None
    assert logprobs.grad is not None


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_is_not_hidden(kind):
    nan = torch.tensor([math.nan])
    assert kl_estimate(nan, torch.zeros(1), kind=kind).isnan().all()
    assert kl_estimate(torch.zeros(1), nan, kind=kind).isnan().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(kind, dtype):
    a, b = torch.tensor([-1.3, -0.7]).to(dtype), torch.tensor([-1.25, -5.0]).to(dtype)
    half = kl_estimate(a, b, kind=kind)
    assert half.dtype == torch.float32
    assert torch.equal(half, kl_estimate(a.float(), b.float(), kind=kind))


def test_float64_stays_float64():
    assert kl_estimate(torch.zeros(1, dtype=F64), torch.zeros(1, dtype=F64), kind="k3").dtype == F64


def test_different_shapes_are_refused_not_broadcast():
    with pytest.raises(ValueError, match="must share a shape"):
        kl_estimate(torch.zeros(3), torch.zeros(1), kind="k1")


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), kind="k4")


# ---- weighed by the ratio to the policy that sampled -----------------------------------------------------------------


def test_the_ratio_weighs_the_estimate_by_hand():
    # r = .6 / .3 = 2, d = ln(.6 / .2) = 1.098612: k1 2.197225; k2 2 x .603474 = 1.206949; k3 2 (1/3 + .098612) = .863891
    # gradients: r (k + k'): k1 2 (1.098612 + 1) = 4.197225; k2 2 (.603474 + 1.098612) = 3.404173;
    # k3 2 (.431946 + 1 - 1/3) = 2.197225
    expected = {"k1": (2.197225, 4.197225), "k2": (1.206949, 3.404173), "k3": (0.863891, 2.197225)}
    for kind, (value, slope) in expected.items():
        logprobs = torch.tensor([math.log(0.6)], dtype=F64, requires_grad=True)
        ref, old = (torch.tensor([math.log(p)], dtype=F64) for p in (0.2, 0.3))
        kl = kl_estimate(logprobs, ref, old, kind=kind)
        assert kl.item() == pytest.approx(value, abs=2e-6)
        assert torch.autograd.grad(kl.sum(), logprobs)[0].item() == pytest.approx(slope, abs=2e-6)


triples = st.tuples(st.floats(-4, 0), st.floats(-4, 0), st.floats(-4, 0))


@pytest.mark.parametrize("kind", KINDS)
@seeded
@given(rows=st.lists(triples, min_size=1, max_size=8))
def test_the_weighed_estimate_equals_the_slow_reference(kind, rows):
    logprobs = torch.tensor([x for x, *_ in rows], dtype=F64, requires_grad=True)
    ref, old = (torch.tensor([row[i] for row in rows], dtype=F64) for i in (1, 2))
    kl = kl_estimate(logprobs, ref, old, kind=kind)
    slopes = torch.autograd.grad(kl.sum(), logprobs)[0]
    for i, (x, y, z) in enumerate(rows):
        value, slope = slow(x - y, kind)
        assert kl[i].item() == pytest.approx(math.exp(x - z) * value, rel=1e-9, abs=1e-11)
        assert slopes[i].item() == pytest.approx(math.exp(x - z) * (value + slope), rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_of_the_weighed_estimate(kind):
    logprobs = torch.tensor([-0.2, -1.5, -4.0, -9.0], dtype=F64, requires_grad=True)
    ref = torch.tensor([-1.0, -1.4, -0.5, -9.0], dtype=F64)
    old = torch.tensor([-0.7, -1.5, -3.0, -8.0], dtype=F64)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref, old, kind=kind), (logprobs,))


@pytest.mark.parametrize("kind", ["k1", "k3"])
@pytest.mark.parametrize("q", [(0.7, 0.2, 0.1), (0.2, 0.2, 0.6)])
def test_the_weighed_estimate_has_the_kls_value_and_gradient_whatever_policy_sampled(kind, q):
    # sum_v q_v r_v k(v), with samples from q: the KL itself, its gradient included
    theta = torch.tensor([0.3, -0.2, 0.9], dtype=F64, requires_grad=True)
    old, ref = torch.tensor(q, dtype=F64), torch.tensor([0.5, 0.25, 0.25], dtype=F64)
    p = theta.softmax(0)
    true = (p * (p / ref).log()).sum()
    found = (old * kl_estimate(p.log(), ref.log(), old.log(), kind=kind)).sum()
    assert found.item() == pytest.approx(true.item(), abs=1e-12)
    gradients = [torch.autograd.grad(x, theta, retain_graph=True)[0] for x in (true, found)]
    assert torch.allclose(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_the_weighed_estimate_has_the_value_of_the_plain_one(kind):
    logprobs, ref = torch.tensor([-0.3, -7.0], dtype=F64), torch.tensor([-1.0, -6.0], dtype=F64)
    assert torch.equal(kl_estimate(logprobs, ref, logprobs, kind=kind), kl_estimate(logprobs, ref, kind=kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("log_ratio", [-1e4, -89.0, 89.0, 1e4])
def test_an_extreme_ratio_is_finite_in_float32(kind, log_ratio):
    logprobs = torch.tensor([-1.0], requires_grad=True)
    kl = kl_estimate(logprobs, torch.tensor([-1.5]), torch.tensor([-1.0 - log_ratio]), kind=kind)
    kl.sum().backward()
    assert kl.isfinite().all()
    assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_flows_into_old_logprobs_and_a_nan_there_is_not_hidden(kind):
    logprobs, old = torch.tensor([-1.0], requires_grad=True), torch.tensor([-2.0], requires_grad=True)
    kl_estimate(logprobs, torch.tensor([-1.5]), old, kind=kind).sum().backward()
    assert old.grad is None
    nan = torch.tensor([math.nan])
    assert kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.5]), nan, kind=kind).isnan().all()


@pytest.mark.parametrize("kind", KINDS)
@seeded
@given(rows=st.lists(triples, min_size=1, max_size=8), data=st.data())
def test_order_and_split_of_tokens_do_not_matter(kind, rows, data):
    order = torch.tensor(data.draw(st.permutations(range(len(rows)))))
    cut = data.draw(st.integers(0, len(rows)))
    columns = [torch.tensor([row[i] for row in rows], dtype=F64) for i in range(3)]
    whole = kl_estimate(*columns, kind=kind)
    parts = [kl_estimate(*(c[order][s] for c in columns), kind=kind) for s in (slice(None, cut), slice(cut, None))]
    # elementwise arithmetic; vectorised and scalar exp may differ in the last bit
    assert torch.allclose(torch.cat(parts), whole[order], rtol=1e-12, atol=1e-15)


def test_old_logprobs_of_another_shape_are_refused_not_broadcast():
    with pytest.raises(ValueError, match="must share a shape"):
        kl_estimate(torch.zeros(3), torch.zeros(3), torch.zeros(1), kind="k1")
