"""The clipped value loss: values by hand, a slow reference of branches, its gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.ops import value_loss

F64 = torch.float64
NUMBERS = st.floats(-3, 3)


def call(rows, **options):
    values, old, returns = (torch.tensor([row[i] for row in rows], dtype=F64) for i in range(3))
    values.requires_grad_()
    loss, clipped = value_loss(values, old, returns, **options)
    return loss.tolist(), torch.autograd.grad(loss.sum(), values)[0].tolist(), clipped.tolist()


def test_the_clipped_value_loss_by_hand():
    # old 0, eps .2, return 1. V = .1: (.9)^2 / 2 = .405, gradient -.9. V = .5 has moved too far: held at .2, .8^2 / 2 = .32,
    # no gradient. V = -.5 has moved away: 1.5^2 / 2 = 1.125 is larger than 1.2^2 / 2, gradient -1.5. V = 1.9: held at .2:
    # .8^2 = .64 < .81 = .9^2: .405, gradient .9.
    loss, gradient, clipped = call(
        [(0.1, 0.0, 1.0), (0.5, 0.0, 1.0), (-0.5, 0.0, 1.0), (1.9, 0.0, 1.0)], eps_clip_value=0.2
    )
    assert loss == pytest.approx([0.405, 0.32, 1.125, 0.405], abs=1e-12)
    assert gradient == pytest.approx([-0.9, 0.0, -1.5, 0.9], abs=1e-12)
    assert clipped == [False, True, False, False]


def slow(value, old, target, eps):
    """(loss, gradient, clipped), case by case: which side of its band the value is on, and where the return is."""
    edge = old + eps if value > old + eps else old - eps if value < old - eps else None
    if edge is not None and abs(edge - target) > abs(value - target):
        return (edge - target) ** 2 / 2, 0.0, True
    return (value - target) ** 2 / 2, value - target, False


@pytest.mark.parametrize("eps", [0.2, 1.0])
@settings(derandomize=True, deadline=None, max_examples=80)
@given(rows=st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=9))
def test_the_clipped_value_loss_equals_the_slow_reference(eps, rows):
    loss, gradient, clipped = call(rows, eps_clip_value=eps)
    expected = [slow(*row, eps) for row in rows]
    for i, (_, _, is_clipped) in enumerate(expected):
        assert loss[i] == pytest.approx(expected[i][0], rel=1e-12, abs=1e-12)
        if is_clipped == clipped[i]:  # they differ by rounding where both branches are equal
            assert gradient[i] == pytest.approx(expected[i][1], rel=1e-12, abs=1e-12)


def test_without_a_clip_it_is_half_the_squared_distance():
    loss, gradient, clipped = call([(5.0, 0.0, 1.0), (-5.0, 0.0, 1.0)], eps_clip_value=None)
    assert (loss, gradient, clipped) == ([8.0, 18.0], [4.0, -6.0], [False, False])


def test_before_the_first_update_nothing_is_clipped():
    *_, clipped = call([(0.5, 0.5, 9.0), (-2.0, -2.0, 0.0)], eps_clip_value=1e-9)
    assert clipped == [False, False]


@pytest.mark.parametrize("eps", [0.3, None])
def test_gradients_agree_with_finite_differences(eps):
    values = torch.tensor([0.1, 0.9, -0.8, 2.0], dtype=F64, requires_grad=True)
    old, returns = torch.zeros(4, dtype=F64), torch.tensor([1.0, 1.0, 1.0, 0.5], dtype=F64)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, eps_clip_value=eps).loss, values)


def test_only_the_values_carry_gradient_and_float32_is_the_least():
    values, old, returns = (torch.ones(2, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    loss = value_loss(values * 2, old * 1, returns * 3, eps_clip_value=0.1).loss
    loss.sum().backward()
    assert loss.dtype == torch.float32
    assert (values.grad is not None, old.grad, returns.grad) == (True, None, None)


def test_a_value_that_is_not_finite_is_not_hidden():
    loss, *_ = value_loss(torch.tensor([math.nan]), torch.zeros(1), torch.ones(1), eps_clip_value=0.2)
    assert loss.isnan().all()


@pytest.mark.parametrize("eps", [0.0, -1.0, math.nan])
def test_a_clip_that_lets_no_value_move_is_refused(eps):
    with pytest.raises(ValueError, match="eps_clip_value must be > 0"):
        value_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), eps_clip_value=eps)


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match="must share a shape"):
        value_loss(torch.zeros(2), torch.zeros(1), torch.zeros(2), eps_clip_value=0.2)
