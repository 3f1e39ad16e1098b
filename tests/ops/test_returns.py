"""Whitening, discounted returns and REINFORCE++: numbers per token, against loops over tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.ops.advantages import (
    discounted_returns,
    last_token_rewards,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    whiten,
)

F64 = torch.float64
seeded = settings(derandomize=True, deadline=None, max_examples=60)
GRID = st.integers(-128, 128).map(lambda x: x / 64)
# (token number, is trainable) of each sequence
SEQUENCES = st.lists(st.lists(st.tuples(GRID, st.booleans()), min_size=0, max_size=6), min_size=1, max_size=5)


def flat(sequences, *, planted=None):
    """Numbers, mask and ids 0 .. S-1; `planted` stands in every masked slot."""
    rows = [(s, x if m or planted is None else planted, m) for s, row in enumerate(sequences) for x, m in row]
    return (
        torch.tensor([x for _, x, _ in rows], dtype=F64),
        torch.tensor([m for *_, m in rows], dtype=torch.bool),
        torch.tensor([s for s, *_ in rows], dtype=torch.long),
    )


# ---- whitening -------------------------------------------------------------------------------------------------------


def test_whitening_by_hand():
    # case 12: mean 2.5, sample deviation sqrt(5 / 3) = 1.290994
    found = whiten(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64), torch.ones(4, dtype=torch.bool))
    assert found.tolist() == pytest.approx([-1.161895, -0.387298, 0.387298, 1.161895], abs=1e-6)


def slow_whiten(numbers, mask, eps=1e-8):
    kept = [x for x, m in zip(numbers, mask, strict=True) if m]
    if not kept:
        return [0.0] * len(numbers)
    mean = math.fsum(kept) / len(kept)
    variance = math.fsum((x - mean) ** 2 for x in kept) / max(len(kept) - 1, 1)
    return [(x - mean) / math.sqrt(variance + eps) if m else 0.0 for x, m in zip(numbers, mask, strict=True)]


@pytest.mark.parametrize("eps", [1e-8, 0.5])
@seeded
@given(rows=st.lists(st.tuples(GRID, st.booleans()), max_size=12))
def test_whitening_equals_the_slow_reference(eps, rows):
    numbers, mask, _ = flat([rows])
    expected = slow_whiten(numbers.tolist(), mask.tolist(), eps)
    assert whiten(numbers, mask, std_eps=eps).tolist() == pytest.approx(expected, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("mask", [[False, True, False], [False] * 3])
def test_one_valid_token_or_none_gives_zero(mask):
    # case 12
    assert whiten(torch.tensor([1.0, 2.0, 3.0]), torch.tensor(mask)).tolist() == [0.0] * 3
    assert whiten(torch.zeros(0), torch.zeros(0, dtype=torch.bool)).tolist() == []


@pytest.mark.parametrize("value, size", [(0.1, 7), (1e8, 3), (-1e-30, 2)])
def test_equal_values_whiten_to_exactly_zero(value, size):
    assert whiten(torch.full((size,), value), torch.ones(size, dtype=torch.bool)).tolist() == [0.0] * size


@pytest.mark.parametrize("planted", [math.nan, math.inf, 1e300])
def test_what_stands_in_masked_slots_does_not_reach_the_statistics(planted):
    mask = torch.tensor([True, False, True, True])
    found = whiten(torch.tensor([1.0, planted, 2.0, 6.0], dtype=F64), mask)
    # mean 3, sample deviation sqrt(14 / 2) = 2.645751
    assert found.tolist() == pytest.approx([-0.755929, 0.0, -0.377964, 1.133893], abs=1e-6)


@pytest.mark.parametrize("planted", [math.nan, math.inf])
def test_a_trainable_number_that_is_not_finite_is_not_whitened_to_zero(planted):
    # case 14: it must be seen, here or by whoever looks at the loss
    numbers = torch.tensor([1.0, planted, 2.0])
    try:
        found = whiten(numbers, torch.ones(3, dtype=torch.bool))
    except ValueError:
        return
    assert not found.isfinite().all()


@pytest.mark.parametrize("shift, scale", [(100.0, 1.0), (0.0, 1000.0), (-3.0, 0.5)])
def test_whitening_ignores_shift_and_scale(shift, scale):
    numbers, mask = torch.tensor([0.5, -1.0, 2.0, 0.25], dtype=F64), torch.ones(4, dtype=torch.bool)
    moved = whiten(numbers * scale + shift, mask, std_eps=1e-16)
    assert torch.allclose(moved, whiten(numbers, mask, std_eps=1e-16), rtol=1e-10, atol=1e-10)


def test_whitening_keeps_the_shape_and_gives_at_least_float32_without_gradient():
    numbers = torch.arange(6.0).view(2, 3)
    found = whiten(numbers.requires_grad_(), torch.ones(2, 3, dtype=torch.bool))
    assert found.shape == (2, 3)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    assert whiten(numbers.detach().bfloat16(), torch.ones(2, 3, dtype=torch.bool)).dtype == torch.float32


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="must share a shape"):
        whiten(torch.zeros(3), torch.ones(1, dtype=torch.bool))


# ---- returns ---------------------------------------------------------------------------------------------------------


def test_discounted_returns_by_hand():
    # gamma .5, rewards 1, 2, (masked), 4: 4; 2 + .5 x 4 = 4; 1 + .5 x 4 = 3. The other sequence: 8
    rewards, mask = torch.tensor([1.0, 2.0, 100.0, 4.0, 8.0]), torch.tensor([True, True, False, True, True])
    found = discounted_returns(rewards, mask, torch.tensor([0, 0, 0, 0, 1]), gamma=0.5)
    assert found.tolist() == [3.0, 4.0, 0.0, 4.0, 8.0]


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@seeded
@given(sequences=SEQUENCES)
def test_discounted_returns_equal_the_double_sum(gamma, sequences):
    rewards, mask, ids = flat(sequences)
    expected = []
    for row in sequences:
        kept = [x for x, m in row if m]
        sums = [math.fsum(gamma**j * x for j, x in enumerate(kept[i:])) for i in range(len(kept))]
        left = iter(sums)
        expected += [next(left) if m else 0.0 for _, m in row]
    assert discounted_returns(rewards, mask, ids, gamma=gamma).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_without_discount_a_return_is_the_sum_of_what_follows_and_with_all_discount_the_reward_itself():
    rewards, mask, ids = torch.tensor([1.0, 2.0, 4.0]), torch.ones(3, dtype=torch.bool), torch.zeros(3).long()
    assert discounted_returns(rewards, mask, ids, gamma=1.0).tolist() == [7.0, 6.0, 4.0]
    assert discounted_returns(rewards, mask, ids, gamma=0.0).tolist() == [1.0, 2.0, 4.0]


def test_tool_tokens_are_no_steps_of_the_discount():
    # case 11's layout T,T,M,M,T,M with outcome 1 and gamma .5: .25, .5, 1 (faulty .0625, .125, 1)
    mask = torch.tensor([True, True, False, False, True, False])
    earned = last_token_rewards(torch.tensor([1.0]), mask, torch.zeros(6).long())
    found = discounted_returns(earned, mask, torch.zeros(6).long(), gamma=0.5)
    assert found.tolist() == [0.25, 0.5, 0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("gamma", [-0.1, 1.1, math.nan])
def test_a_discount_out_of_range_is_refused(gamma):
    with pytest.raises(ValueError, match="gamma must be in"):
        discounted_returns(torch.zeros(1), torch.ones(1, dtype=torch.bool), torch.zeros(1).long(), gamma=gamma)


@pytest.mark.parametrize("shapes", [(3, 1, 3), (3, 3, 1), (1, 3, 3)])
def test_returns_of_different_shapes_are_refused(shapes):
    a, b, c = shapes
    with pytest.raises(ValueError, match="must share a shape"):
        discounted_returns(torch.zeros(a), torch.ones(b, dtype=torch.bool), torch.zeros(c).long(), gamma=1.0)


def test_a_reward_sits_on_the_last_trainable_token_and_never_on_padding():
    # case 13: sequence 1 has no trainable token, and its reward appears nowhere; sequence 2 ends in masked tokens
    mask = torch.tensor([True, True, False, True, False, False])
    ids = torch.tensor([0, 0, 1, 2, 2, 2])
    assert last_token_rewards(torch.tensor([1.0, 50.0, 3.0]), mask, ids).tolist() == [0.0, 1.0, 0.0, 3.0, 0.0, 0.0]


@seeded
@given(SEQUENCES)
def test_rewards_on_last_tokens_equal_the_slow_reference(sequences):
    _, mask, ids = flat(sequences)
    rewards = [s + 0.5 for s in range(len(sequences))]
    expected = []
    for reward, row in zip(rewards, sequences, strict=True):
        places = [i for i, (_, m) in enumerate(row) if m]
        expected += [reward if places and i == places[-1] else 0.0 for i in range(len(row))]
    assert last_token_rewards(torch.tensor(rewards), mask, ids).tolist() == expected


# ---- REINFORCE++ -----------------------------------------------------------------------------------------------------


def test_reinforce_plus_plus_by_hand():
    # gamma .5, penalties .2, 0 | .4, rewards 1, 0. Returns: 1, -.2 + .5 = .3 | -.4. Mean .3, squared distances .49 + 0 + .49,
    # deviation sqrt(.98 / 2) = .7: 0, 1, -1
    mask, ids = torch.ones(3, dtype=torch.bool), torch.tensor([0, 0, 1])
    found = reinforce_plus_plus(torch.tensor([-0.2, 1.0, -0.4], dtype=F64), mask, ids, gamma=0.5)
    assert found.tolist() == pytest.approx([0.0, 1.0, -1.0], abs=1e-7)


def test_reinforce_plus_plus_baseline_by_hand():
    # rewards 1, 0 | 5, 3 in groups of two: .5, -.5 | 1, -1 on 1, 1 | 1, 2 tokens; penalty .5 on the last token: -1.5.
    # Mean (.5 - .5 + 1 - 1 - 1.5) / 5 = -.3; distances .8, -.2, 1.3, -.7, -1.2; squares .64 + .04 + 1.69 + .49 + 1.44 = 4.3;
    # deviation sqrt(4.3 / 4) = 1.036822
    found = reinforce_plus_plus_baseline(
        torch.tensor([1.0, 0.0, 5.0, 3.0], dtype=F64),
        torch.tensor([8, 8, 2, 2]),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5], dtype=F64),
        torch.ones(5, dtype=torch.bool),
        torch.tensor([0, 1, 2, 3, 3]),
    )
    assert found.tolist() == pytest.approx([0.771588, -0.192897, 1.253831, -0.675140, -1.157383], abs=1e-5)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@seeded
@given(sequences=SEQUENCES)
def test_reinforce_plus_plus_equals_the_slow_reference(gamma, sequences):
    earned, mask, ids = flat(sequences)
    returns = []
    for row in sequences:
        kept = [x for x, m in row if m]
        left = iter([math.fsum(gamma**j * x for j, x in enumerate(kept[i:])) for i in range(len(kept))])
        returns += [next(left) if m else 0.0 for _, m in row]
    found = reinforce_plus_plus(earned, mask, ids, gamma=gamma)
    # returns that are equal but for a rounding error are divided by sqrt(1e-8)
    assert found.tolist() == pytest.approx(slow_whiten(returns, mask.tolist()), rel=1e-9, abs=1e-9)


@seeded
@given(SEQUENCES, st.data())
def test_reinforce_plus_plus_baseline_equals_the_slow_reference(sequences, data):
    penalty, mask, ids = flat(sequences)
    rewards = data.draw(st.lists(GRID, min_size=len(sequences), max_size=len(sequences)))
    groups = data.draw(st.lists(st.integers(0, 2), min_size=len(sequences), max_size=len(sequences)))
    numbers = []
    for s, row in enumerate(sequences):
        others = [r for r, g in zip(rewards, groups, strict=True) if g == groups[s]]
        numbers += [rewards[s] - math.fsum(others) / len(others) - x for x, _ in row]
    found = reinforce_plus_plus_baseline(
        torch.tensor(rewards, dtype=F64), torch.tensor(groups), penalty, mask, ids
    ).tolist()
    assert found == pytest.approx(slow_whiten(numbers, mask.tolist()), rel=1e-9, abs=1e-9)


def both(rewards, penalty, mask, ids):
    """Each of the two, the second with all rollouts in one group."""
    yield reinforce_plus_plus(last_token_rewards(rewards, mask, ids) - penalty, mask, ids, gamma=0.9)
    yield reinforce_plus_plus_baseline(rewards, torch.zeros(len(rewards)).long(), penalty, mask, ids)


SOME = [[(0.1, True), (0.0, False), (0.3, True)], [(0.2, False), (-0.1, True)], [(0.5, True)]]


@pytest.mark.parametrize("planted", [math.nan, math.inf, 1e30])
def test_a_penalty_in_a_masked_slot_changes_nothing(planted):
    rewards = torch.tensor([1.0, 0.0, 0.5], dtype=F64)
    clean, spoiled = both(rewards, *flat(SOME)), both(rewards, *flat(SOME, planted=planted))
    for a, b in zip(clean, spoiled, strict=True):
        assert torch.equal(a, b)
        assert a[1].item() == a[3].item() == 0.0


def test_a_penalty_that_is_not_finite_in_a_trainable_slot_is_not_hidden():
    penalty, mask, ids = flat(SOME)
    penalty[0] = math.nan
    for found in both(torch.tensor([1.0, 0.0, 0.5], dtype=F64), penalty, mask, ids):
        assert not found.isfinite().all()


def test_an_empty_response_changes_nobody_through_its_padding():
    # case 13: a rollout without trainable tokens adds padding to the batch and nothing to REINFORCE++
    rewards = torch.tensor([1.0, 0.0, 0.5, 9.0], dtype=F64)
    alone, _ = both(rewards[:3], *flat(SOME))
    beside, _ = both(rewards, *flat([*SOME, [(7.0, False)] * 4]))
    assert torch.equal(beside[: len(alone)], alone)
    assert not beside[len(alone) :].any()


def test_the_order_of_sequences_does_not_matter():
    rewards, order = torch.tensor([1.0, 0.0, 0.5], dtype=F64), [2, 0, 1]
    first = both(rewards, *flat(SOME))
    second = both(rewards[order], *flat([SOME[s] for s in order]))
    for a, b in zip(first, second, strict=True):
        parts = list(a.split([len(row) for row in SOME]))
        assert torch.allclose(b, torch.cat([parts[s] for s in order]), rtol=1e-12, atol=1e-12)


def test_without_a_discount_and_a_penalty_every_token_of_a_rollout_has_one_advantage():
    _, mask, ids = flat(SOME)
    rewards = torch.tensor([1.0, 0.0, 0.5], dtype=F64)
    found = reinforce_plus_plus(last_token_rewards(rewards, mask, ids), mask, ids, gamma=1.0)
    assert torch.allclose(found, whiten(rewards[ids], mask), rtol=1e-12, atol=1e-12)


def test_float32_rewards_give_float32():
    penalty, mask, ids = flat(SOME)
    _, baseline = both(torch.tensor([1.0, 0.0, 0.5]), penalty, mask, ids)
    assert baseline.dtype == torch.float32
    assert reinforce_plus_plus(penalty.float(), mask, ids, gamma=0.9).dtype == torch.float32
