"""GAE against a loop over steps, and what must hold of it: masked tokens are no steps, sequences are apart."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.ops import discounted_returns, gae, last_token_rewards, whiten

F64 = torch.float64
seeded = settings(derandomize=True, deadline=None, max_examples=60)
GRID = st.integers(-128, 128).map(lambda x: x / 64)
# (reward, value, is trainable) of each token of each sequence
SEQUENCES = st.lists(st.lists(st.tuples(GRID, GRID, st.booleans()), min_size=0, max_size=7), min_size=1, max_size=5)


def flat(sequences, *, planted=None):
    """Rewards, values, mask and ids (three apart); `planted` stands in every masked slot."""
    rows = [(3 * s, *token) for s, row in enumerate(sequences) for token in row]

    def column(place):
        return torch.tensor([row[place] if row[3] or planted is None else planted for row in rows], dtype=F64)

    mask = torch.tensor([row[3] for row in rows], dtype=torch.bool)
    return column(1), column(2), mask, torch.tensor([row[0] for row in rows], dtype=torch.long)


def slow_gae(sequences, *, gamma, lam_of):
    """Advantages per token, 0 where masked: the sum over pairs of steps (t, s) that the recursion stands for."""
    found = []
    for row in sequences:
        steps = [(reward, value) for reward, value, m in row if m]
        after = [*(value for _, value in steps), 0.0][1:]
        lam = lam_of(len(steps)) if steps else 0.0
        deltas = [r + gamma * n - v for (r, v), n in zip(steps, after, strict=True)]
        sums = [
            math.fsum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, len(steps))) for t in range(len(steps))
        ]
        left = iter(sums)
        found += [next(left) if m else 0.0 for *_, m in row]
    return found


def plus_values(sequences, advantages):
    tokens = [token for row in sequences for token in row]
    return [a + v if m else 0.0 for a, (_, v, m) in zip(advantages, tokens, strict=True)]


def test_gae_by_hand():
    # Case 11: values .2, .4, .6, reward 1 at the end, gamma 1, lambda .95. delta: .4 - .2 = .2, .6 - .4 = .2, 1 - .6 = .4;
    # A: .4, .2 + .95 x .4 = .58, .2 + .95 x .58 = .751; returns .6 + .4 = 1, .4 + .58 = .98, .2 + .751 = .951
    values, mask, ids = torch.tensor([0.2, 0.4, 0.6], dtype=F64), torch.ones(3).bool(), torch.zeros(3).long()
    found = gae(torch.tensor([0.0, 0.0, 1.0], dtype=F64), values, mask, ids, gamma=1.0, lam=0.95)
    assert found.advantages.tolist() == pytest.approx([0.751, 0.58, 0.4], abs=1e-12)
    assert found.returns.tolist() == pytest.approx([0.951, 0.98, 1.0], abs=1e-12)


def test_tool_tokens_are_no_steps():
    # Case 11: layout T, T, M, M, T, M, outcome 1, values 0, gamma 1, lambda .5: .25, .5, 1 (faulty .03125, .0625, .5)
    mask, ids = torch.tensor([True, True, False, False, True, False]), torch.zeros(6).long()
    earned = last_token_rewards(torch.tensor([1.0]), mask, ids)
    found = gae(earned, torch.zeros(6), mask, ids, gamma=1.0, lam=0.5)
    assert found.advantages.tolist() == [0.25, 0.5, 0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.0, 1.0)])
@seeded
@given(sequences=SEQUENCES)
def test_gae_equals_the_double_sum(gamma, lam, sequences):
    found = gae(*flat(sequences), gamma=gamma, lam=lam)
    expected = slow_gae(sequences, gamma=gamma, lam_of=lambda steps: lam)
    assert found.advantages.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert found.returns.tolist() == pytest.approx(plus_values(sequences, expected), rel=1e-12, abs=1e-12)


@seeded
@given(sequences=SEQUENCES)
def test_a_lambda_of_its_own_for_the_returns_leaves_the_advantages(sequences):
    # Decoupled GAE: the advantages are those of lam, the returns those of lam_value
    found = gae(*flat(sequences), gamma=0.9, lam=0.5, lam_value=1.0)
    policy, value = (slow_gae(sequences, gamma=0.9, lam_of=lambda steps, lam=lam: lam) for lam in (0.5, 1.0))
    assert found.advantages.tolist() == pytest.approx(policy, rel=1e-12, abs=1e-12)
    assert found.returns.tolist() == pytest.approx(plus_values(sequences, value), rel=1e-12, abs=1e-12)


def test_the_length_adaptive_lambda_by_hand():
    # alpha .5. Two steps: lambda 1 - 1 / (.5 x 2) = 0. Four: 1 - 1 / 2 = .5. One: 1 - 2 = -1, held at 0.
    # Values 0, gamma 1, reward 1 at the end: 0, 1 | .125, .25, .5, 1 | 1
    mask, ids = torch.tensor([True, True, False, True, True, True, True, True]), torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
    earned = last_token_rewards(torch.ones(3), mask, ids)
    found = gae(earned, torch.zeros(8), mask, ids, gamma=1.0, lam=0.7, length_adaptive_alpha=0.5)
    assert found.advantages.tolist() == [0.0, 1.0, 0.0, 0.125, 0.25, 0.5, 1.0, 1.0]


@seeded
@given(sequences=SEQUENCES)
def test_the_length_adaptive_lambda_equals_the_slow_reference(sequences):
    found = gae(*flat(sequences), gamma=1.0, lam=0.3, lam_value=1.0, length_adaptive_alpha=0.4)
    policy = slow_gae(sequences, gamma=1.0, lam_of=lambda steps: max(0.0, 1 - 1 / (0.4 * steps)))
    value = slow_gae(sequences, gamma=1.0, lam_of=lambda steps: 1.0)
    assert found.advantages.tolist() == pytest.approx(policy, rel=1e-12, abs=1e-12)
    assert found.returns.tolist() == pytest.approx(plus_values(sequences, value), rel=1e-12, abs=1e-12)


@seeded
@given(sequences=SEQUENCES)
def test_whitening_touches_the_advantages_and_not_the_returns(sequences):
    tensors = flat(sequences)
    plain, white = (gae(*tensors, gamma=0.9, lam=0.8, whiten=w) for w in (False, True))
    assert torch.equal(plain.returns, white.returns)
    assert torch.equal(white.advantages, whiten(plain.advantages, tensors[2]))


def test_with_lambda_1_the_return_is_what_is_earned_whatever_the_values_say():
    rewards, values, mask, ids = flat([[(1.0, 0.3, True), (0.5, 9.0, False), (2.0, -4.0, True)], [(3.0, 1.0, True)]])
    found = gae(rewards, values, mask, ids, gamma=0.5, lam=1.0)
    assert torch.allclose(found.returns, discounted_returns(rewards, mask, ids, gamma=0.5), rtol=1e-12, atol=1e-12)


def test_with_right_values_and_no_noise_every_advantage_is_0():
    # The rewards to come are 3, 2, 0: a critic that says so is never surprised
    rewards, values = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([3.0, 2.0, 0.0])
    for lam in (0.0, 0.7, 1.0):
        found = gae(rewards, values, torch.ones(3).bool(), torch.zeros(3).long(), gamma=1.0, lam=lam)
        assert found.advantages.tolist() == [0.0, 0.0, 0.0]
        assert found.returns.tolist() == [3.0, 2.0, 0.0]


SOME = [
    [(0.1, 0.5, True), (7.0, 7.0, False), (0.3, -0.2, True)],
    [(0.2, 0.1, False), (-0.1, 0.4, True)],
    [(0.5, 1.0, True)],
]
ALL_OPTIONS = {"gamma": 0.9, "lam": 0.8, "lam_value": 0.95, "length_adaptive_alpha": 0.6, "whiten": True}


@pytest.mark.parametrize("planted", [math.nan, math.inf, 1e300])
def test_what_stands_in_masked_slots_changes_nothing(planted):
    for one, other in zip(
        gae(*flat(SOME), **ALL_OPTIONS), gae(*flat(SOME, planted=planted), **ALL_OPTIONS), strict=True
    ):
        assert torch.equal(one, other)


def test_masked_tokens_may_as_well_be_left_out():
    with_masked = gae(*flat(SOME), **ALL_OPTIONS)
    mask = flat(SOME)[2]
    without = gae(*flat([[token for token in row if token[2]] for row in SOME]), **ALL_OPTIONS)
    for one, other in zip(with_masked, without, strict=True):
        assert torch.equal(one[mask], other)
        assert not one[~mask].any()


def test_a_value_that_is_not_finite_is_not_hidden_and_stays_in_its_sequence():
    rewards, values, mask, ids = flat(SOME)
    values[2] = math.nan
    found = gae(rewards, values, mask, ids, gamma=0.9, lam=0.8)
    assert found.advantages.isnan().tolist() == [True, False, True, False, False, False]


def test_an_empty_response_changes_nobody():
    # case 13
    alone, beside = (gae(*flat(rows), **ALL_OPTIONS) for rows in (SOME, [*SOME, [(9.0, 9.0, False)] * 3]))
    for one, other in zip(alone, beside, strict=True):
        assert torch.equal(one, other[: len(one)])


@pytest.mark.parametrize("order", [[2, 0, 1], [1, 2, 0]])
def test_the_order_of_sequences_does_not_matter(order):
    lengths = [len(row) for row in SOME]
    for one, other in zip(
        gae(*flat(SOME), **ALL_OPTIONS), gae(*flat([SOME[s] for s in order]), **ALL_OPTIONS), strict=True
    ):
        moved = torch.cat([one.split(lengths)[s] for s in order])
        assert torch.allclose(other, moved, rtol=1e-12, atol=1e-12)


def test_sequences_may_be_interleaved():
    tensors = flat(SOME)
    places = torch.tensor([3, 0, 5, 1, 4, 2])  # each sequence's tokens in their order
    for one, other in zip(
        gae(*tensors, **ALL_OPTIONS), gae(*(tensor[places] for tensor in tensors), **ALL_OPTIONS), strict=True
    ):
        assert torch.allclose(one[places], other, rtol=1e-12, atol=1e-12)


def test_there_is_no_gradient_and_float32_stays():
    rewards, values, mask, ids = flat(SOME)
    for found in gae(rewards.float(), values.float().requires_grad_(), mask, ids, **ALL_OPTIONS):
        assert found.dtype == torch.float32
        assert not found.requires_grad


@pytest.mark.parametrize(
    "changed", [{"gamma": 1.1}, {"lam": -0.1}, {"lam_value": 2.0}, {"length_adaptive_alpha": 0.0}, {"lam": math.nan}]
)
def test_an_option_out_of_range_is_refused(changed):
    (name,) = changed
    with pytest.raises(ValueError, match=f"{name} must be"):
        gae(*flat(SOME), **ALL_OPTIONS | changed)


@pytest.mark.parametrize("place", range(4))
def test_shapes_that_differ_are_refused(place):
    tensors = list(flat(SOME))
    tensors[place] = tensors[place][:1]
    with pytest.raises(ValueError, match="must share a shape"):
        gae(*tensors, gamma=1.0, lam=1.0)
