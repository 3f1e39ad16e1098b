"""GRPO's advantages: groups by id, of any sizes and in any order."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.ops import group_advantages

F64 = torch.float64
seeded = settings(derandomize=True, deadline=None, max_examples=60)
# rewards on a grid: two that differ do so by at least 1/64, so a rounding error cannot pass for a difference
rewards_of_groups = st.lists(st.tuples(st.integers(-128, 128), st.integers(0, 3)), min_size=1, max_size=16)


def slow(rewards, groups, *, normalize, eps=1e-6):
    """Python loops over lists, one group at a time."""
    found = [0.0] * len(rewards)
    for g in set(groups):
        rows = [i for i, other in enumerate(groups) if other == g]
        mean = math.fsum(rewards[i] for i in rows) / len(rows)
        variance = math.fsum((rewards[i] - mean) ** 2 for i in rows) / max(len(rows) - 1, 1)
        for i in rows:
            found[i] = rewards[i] - mean
            if normalize:
                found[i] /= math.sqrt(variance) + eps
    return found


UNEVEN = [1.0, 2.0, 3.0, 4.0, 10.0, 12.0, 5.0, 6.0, 7.0]
UNEVEN_GROUPS = [0, 0, 0, 0, 1, 1, 2, 2, 2]
ORDERS = [list(range(9)), [4, 0, 6, 1, 8, 5, 2, 7, 3], list(range(8, -1, -1))]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "normalize, expected",
    [
        # means 2.5, 11, 6
        (False, [-1.5, -0.5, 0.5, 1.5, -1, 1, -1, 0, 1]),
        # sample deviations sqrt(5/3) = 1.2910, sqrt(2) = 1.4142, 1: 1.5 / 1.2910 = 1.1619, 1 / 1.4142 = .7071
        (True, [-1.1619, -0.3873, 0.3873, 1.1619, -0.7071, 0.7071, -1, 0, 1]),
    ],
)
def test_uneven_groups_in_any_order(order, normalize, expected):
    rewards, groups = torch.tensor(UNEVEN)[order], torch.tensor(UNEVEN_GROUPS)[order]
    advantages = group_advantages(rewards, groups, normalize_std=normalize)
    assert advantages.tolist() == pytest.approx([expected[i] for i in order], abs=5e-5)


@pytest.mark.parametrize("reward, size", [(0.35, 8), (0.1, 7), (0.7, 16), (1e8, 5), (-1e-30, 3)])
@pytest.mark.parametrize("normalize", [True, False])
def test_equal_rewards_give_exactly_zero(reward, size, normalize):
    advantages = group_advantages(
        torch.full((size,), reward), torch.zeros(size, dtype=torch.long), normalize_std=normalize
    )
    assert advantages.tolist() == [0.0] * size


def test_rewards_equal_but_for_a_rounding_error_do_not_blow_up():
    # 0.1 + 0.2 and 0.3 differ by 5.6e-17: the standard deviation is 3.2e-17, far below std_eps
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3], dtype=F64)
    assert group_advantages(rewards, torch.zeros(3, dtype=torch.long)).abs().max() < 1e-9


@pytest.mark.parametrize("normalize", [True, False])
def test_a_group_of_one_gives_zero(normalize):
    rewards, groups = torch.tensor([7.0, 1.0, 3.0]), torch.tensor([5, 2, 2])
    advantages = group_advantages(rewards, groups, normalize_std=normalize)
    assert advantages[0] == 0
    assert advantages[1] == -advantages[2] != 0


def test_a_rollout_in_three_sequences_counts_once():
    # rollout 7 (reward 1) in three sequences, rollout 3 (reward 0) in one: baseline 1 / 2, not 3 / 4
    advantages = group_advantages(
        torch.tensor([1.0, 1.0, 1.0, 0.0]),
        torch.zeros(4, dtype=torch.long),
        normalize_std=False,
        rollout_ids=torch.tensor([7, 7, 7, 3]),
    )
    assert advantages.tolist() == [0.5, 0.5, 0.5, -0.5]


def test_the_standard_deviation_counts_a_rollout_in_three_sequences_once():
    # two rollouts, 1 and 0: sample deviation sqrt(2 * .25 / 1) = .70711; .5 / .70711 = .70711
    advantages = group_advantages(
        torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.zeros(4, dtype=torch.long), rollout_ids=torch.tensor([7, 3, 7, 7])
    )
    assert advantages.tolist() == pytest.approx([0.70711, -0.70711, 0.70711, 0.70711], abs=2e-5)


@seeded
@given(rewards_of_groups, st.booleans(), st.data())
def test_splitting_rollouts_into_more_sequences_changes_nobody(rows, normalize, data):
    rewards = torch.tensor([r / 64 for r, _ in rows], dtype=F64)
    groups, rollouts = torch.tensor([g for _, g in rows]), torch.arange(len(rows))
    once = group_advantages(rewards, groups, normalize_std=normalize)
    repeated = torch.tensor([i for i in range(len(rows)) for _ in range(data.draw(st.integers(1, 3)))])
    again = group_advantages(
        rewards[repeated], groups[repeated], normalize_std=normalize, rollout_ids=rollouts[repeated]
    )
    assert torch.allclose(again, once[repeated], rtol=1e-12, atol=1e-12)


@seeded
@given(rewards_of_groups, st.booleans(), st.sampled_from([1e-6, 0.5]))
def test_equals_the_slow_reference(rows, normalize, eps):
    rewards, groups = [r / 64 for r, _ in rows], [g for _, g in rows]
    advantages = group_advantages(
        torch.tensor(rewards, dtype=F64), torch.tensor(groups), normalize_std=normalize, std_eps=eps
    )
    assert advantages.tolist() == pytest.approx(
        slow(rewards, groups, normalize=normalize, eps=eps), rel=1e-10, abs=1e-10
    )


@seeded
@given(rewards_of_groups, st.booleans(), st.data())
def test_order_and_names_of_groups_do_not_matter(rows, normalize, data):
    order = data.draw(st.permutations(range(len(rows))))
    rewards = torch.tensor([r / 64 for r, _ in rows], dtype=F64)
    groups = torch.tensor([g for _, g in rows])
    names = torch.tensor([10**12, -3, 0, 77])  # ids need be neither small, sorted nor positive
    first = group_advantages(rewards, groups, normalize_std=normalize)
    second = group_advantages(rewards[order], names[groups[order]], normalize_std=normalize)
    assert torch.allclose(second, first[order], rtol=1e-12, atol=1e-12)


@seeded
@given(rewards_of_groups)
def test_other_groups_do_not_change_a_group(rows):
    rewards, groups = torch.tensor([r / 64 for r, _ in rows], dtype=F64), torch.tensor([g for _, g in rows])
    whole = group_advantages(rewards, groups)
    for g in groups.unique():
        alone = group_advantages(rewards[groups == g], groups[groups == g])
        assert torch.allclose(alone, whole[groups == g], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shift, scale", [(1000.0, 1.0), (0.0, 100.0)])
def test_normalised_advantages_ignore_shift_and_scale(shift, scale):
    rewards, groups = torch.tensor(UNEVEN, dtype=F64), torch.tensor(UNEVEN_GROUPS)
    moved = group_advantages(rewards * scale + shift, groups)
    # std_eps = 1e-6 is added after scaling: that alone moves the result, by about 1e-6
    assert torch.allclose(moved, group_advantages(rewards, groups), rtol=0, atol=3e-6)


def test_a_large_common_offset_in_float32_does_not_swallow_the_spread():
    # 16777216 + {0, 2} are exact in float32; their sum is not
    rewards = torch.tensor([16777216.0, 16777218.0, 16777218.0])
    advantages = group_advantages(rewards, torch.zeros(3, dtype=torch.long), normalize_std=False)
    assert advantages.tolist() == pytest.approx([-4 / 3, 2 / 3, 2 / 3], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.float16, torch.bfloat16, torch.float32])
def test_every_narrow_dtype_gives_float32(dtype):
    advantages = group_advantages(torch.tensor([0, 1]).to(dtype), torch.tensor([4, 4]), normalize_std=False)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == [-0.5, 0.5]


def test_float64_stays_float64():
    assert group_advantages(torch.zeros(2, dtype=F64), torch.zeros(2, dtype=torch.long)).dtype == F64


def test_advantages_carry_no_gradient():
    rewards = torch.tensor([0.0, 1.0], requires_grad=True)
    assert not group_advantages(rewards, torch.tensor([0, 0])).requires_grad


@pytest.mark.parametrize("rollout_ids", [None, torch.zeros(0, dtype=torch.long)])
def test_no_rollouts_give_no_advantages(rollout_ids):
    advantages = group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long), rollout_ids=rollout_ids)
    assert advantages.shape == (0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match="finite"):
        group_advantages(torch.tensor([1.0, bad]), torch.tensor([0, 0]))


@pytest.mark.parametrize("rewards, groups", [((3,), (2,)), ((3,), (1,)), ((1, 3), (1, 3)), ((), ())])
def test_shapes_that_are_not_one_vector_are_refused(rewards, groups):
    with pytest.raises(ValueError, match="one length"):
        group_advantages(torch.zeros(rewards), torch.zeros(groups, dtype=torch.long))


def test_rollout_ids_of_another_length_are_refused():
    with pytest.raises(ValueError, match="rollout_ids"):
        group_advantages(torch.zeros(4), torch.zeros(4, dtype=torch.long), rollout_ids=torch.tensor([0, 1]))


def test_a_rollout_id_used_in_two_groups_never_gives_nan():
    # as when rollouts are numbered within their group: either both groups get their own statistics, or it is refused
    rewards, groups, rollouts = (
        torch.tensor([1.0, 0.0, 1.0, 0.0]),
        torch.tensor([0, 0, 1, 1]),
        torch.tensor([0, 1, 0, 1]),
    )
    try:
        advantages = group_advantages(rewards, groups, normalize_std=False, rollout_ids=rollouts).tolist()
    except ValueError:
        return
    assert advantages == [0.5, -0.5, 0.5, -0.5]
