"""RLOO, OPO, MaxRL, pass@k and GDPO: advantages of rollouts, against Python loops over groups and over sets."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.ops import group_advantages
from strop.ops.advantages import gdpo, maxrl, opo, pass_at_k, rloo

F64 = torch.float64
seeded = settings(derandomize=True, deadline=None, max_examples=60)
# (reward, group, length): rewards >= 0 on a grid, so that a rounding error cannot pass for a difference
ROLLOUTS = st.lists(
    st.tuples(st.integers(0, 128).map(lambda x: x / 64), st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=14
)


def rloo_of(rewards, groups, lengths):
    return rloo(rewards, groups)


def maxrl_of(rewards, groups, lengths):
    return maxrl(rewards, groups, mean_eps=1e-6)


def pass_at_1(rewards, groups, lengths):
    return pass_at_k(rewards, groups, k=1, success_reward=1.0)


def gdpo_of(rewards, groups, lengths):
    return gdpo(torch.stack([rewards, lengths.double()], dim=1), groups)


CALLS = [rloo_of, opo, maxrl_of, pass_at_1, gdpo_of]
every_advantage = pytest.mark.parametrize("call", CALLS, ids=["rloo", "opo", "maxrl", "pass_at_k", "gdpo"])


def tensors(rollouts, *, dtype=F64):
    rewards, groups, lengths = zip(*rollouts, strict=True)
    return torch.tensor(rewards, dtype=dtype), torch.tensor(groups), torch.tensor(lengths)


def rows_of_groups(groups):
    for g in sorted(set(groups)):
        yield [i for i, other in enumerate(groups) if other == g]


def by_group(rollouts, of_group):
    """`of_group(rewards, lengths)` of each group, in the order of the rows."""
    found = [0.0] * len(rollouts)
    for rows in rows_of_groups([g for _, g, _ in rollouts]):
        rewards, lengths = [rollouts[i][0] for i in rows], [rollouts[i][2] for i in rows]
        for i, advantage in zip(rows, of_group(rewards, lengths), strict=True):
            found[i] = advantage
    return found


# rewards 1, 0, .5 | 3, 1 | 2, with lengths 1, 3, 4 | 2, 6 | 5, rows of the groups mixed
MIXED = [(1.0, 4, 1), (3.0, 9, 2), (0.0, 4, 3), (2.0, 7, 5), (0.5, 4, 4), (1.0, 9, 6)]


@pytest.mark.parametrize(
    "call, expected",
    [
        # means of the others: .25, .75, .5 | 1, 3 | none
        (rloo_of, [0.75, 2.0, -0.75, 0.0, 0.0, -2.0]),
        # baselines (1 + 0 + 2) / 8 = .375 | (6 + 6) / 8 = 1.5 | equal
        (opo, [0.625, 1.5, -0.375, 0.0, 0.125, -0.5]),
        # means .5 | 2 | 2: .5 / .5, 1 / 2, ...
        (maxrl_of, [1.0, 0.5, -1.0, 0.0, 0.0, -0.5]),
    ],
    ids=["rloo", "opo", "maxrl"],
)
def test_baselines_by_hand_in_groups_of_any_size_and_order(call, expected):
    assert call(*tensors(MIXED)).tolist() == pytest.approx(expected, abs=3e-6)  # maxrl adds 1e-6 to a mean of .5


def slow_rloo(rewards, _):
    if len(rewards) == 1:
        return [0.0]
    return [r - math.fsum(rewards[:i] + rewards[i + 1 :]) / (len(rewards) - 1) for i, r in enumerate(rewards)]


def slow_opo(rewards, lengths):
    # every token's reward is its rollout's: the mean over the tokens of the group
    tokens = [r for r, length in zip(rewards, lengths, strict=True) for _ in range(length)]
    return [r - math.fsum(tokens) / len(tokens) for r in rewards]


def slow_maxrl(rewards, _):
    mean = math.fsum(rewards) / len(rewards)
    return [(r - mean) / (mean + 1e-6) for r in rewards]


@pytest.mark.parametrize("call, slow", [(rloo_of, slow_rloo), (opo, slow_opo), (maxrl_of, slow_maxrl)])
@seeded
@given(rollouts=ROLLOUTS)
def test_baselines_equal_the_slow_reference(call, slow, rollouts):
    found = call(*tensors(rollouts)).tolist()
    assert found == pytest.approx(by_group(rollouts, slow), rel=1e-10, abs=1e-10)


@seeded
@given(ROLLOUTS)
def test_rloo_is_dr_grpo_stretched_by_n_over_n_minus_1(rollouts):
    rewards, groups, _ = tensors(rollouts)
    size = torch.stack([(groups == g).sum() for g in groups])
    stretched = group_advantages(rewards, groups, normalize_std=False) * size / (size - 1).clamp(min=1)
    assert torch.allclose(rloo(rewards, groups), stretched, rtol=1e-12, atol=1e-12)


@seeded
@given(ROLLOUTS, st.integers(1, 50))
def test_opo_of_equal_lengths_is_dr_grpo(rollouts, length):
    rewards, groups, _ = tensors(rollouts)
    found = opo(rewards, groups, torch.full_like(groups, length))
    assert torch.allclose(found, group_advantages(rewards, groups, normalize_std=False), rtol=1e-12, atol=1e-12)


@seeded
@given(ROLLOUTS)
def test_opo_weighed_by_length_sums_to_zero_in_each_group(rollouts):
    rewards, groups, lengths = tensors(rollouts)
    weighed = opo(rewards, groups, lengths) * lengths
    for g in groups.unique():
        assert abs(weighed[groups == g].sum().item()) < 1e-10


def test_maxrl_of_one_success_in_four_is_one_over_the_rate_less_one():
    # mean .25: (1 - .25) / .25 = 3, (0 - .25) / .25 = -1
    found = maxrl(torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=F64), torch.zeros(4, dtype=torch.long), mean_eps=1e-12)
    assert found.tolist() == pytest.approx([-1.0, 3.0, -1.0, -1.0], abs=1e-10)


@pytest.mark.parametrize("call", [rloo, maxrl])
def test_a_rollout_in_three_sequences_counts_once(call):
    # case 10: rollout 7 (reward 1) in three sequences, rollout 3 (reward 0) in one, as if there were two rows
    parts = call(torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.zeros(4, dtype=torch.long), torch.tensor([7, 7, 7, 3]))
    good, bad = call(torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.long)).tolist()
    assert parts.tolist() == [good, good, good, bad]
    assert (good, bad) == pytest.approx((1.0, -1.0), abs=3e-6)


# ---- pass@k ----------------------------------------------------------------------------------------------------------


def test_pass_at_k_by_hand():
    # n = 4, m = 3 fail, k = 2: mean = 1 - 3 / 6 = .5, std = .5; success: .5 / .5 = 1;
    # failure: (.5 - C(2, 1) / C(3, 1)) / .5 = (.5 - .66667) / .5 = -.33333
    found = pass_at_k(torch.tensor([1.0, 0.0, 0.9, -3.0]), torch.zeros(4, dtype=torch.long), k=2)
    assert found.tolist() == pytest.approx([1.0, -0.33333, -0.33333, -0.33333], abs=1e-5)


def slow_pass_at_k(rewards, k):
    """Every set of k is formed, scored 1 if one of it succeeds, normalised over all sets, and averaged over the sets that
    a rollout is in; 0 with one set or none."""
    if len(rewards) <= k:
        return [0.0] * len(rewards)
    sets = list(combinations(range(len(rewards)), k))
    passes = [float(any(rewards[i] >= 1 for i in chosen)) for chosen in sets]
    mean = math.fsum(passes) / len(sets)
    std = math.sqrt(math.fsum((p - mean) ** 2 for p in passes) / len(sets))
    if std == 0:
        return [0.0] * len(rewards)
    found = []
    for i in range(len(rewards)):
        own = [(p - mean) / std for p, chosen in zip(passes, sets, strict=True) if i in chosen]
        found.append(math.fsum(own) / len(own))
    return found


@seeded
@given(st.lists(st.integers(1, 6), min_size=2, max_size=3), st.data())
def test_pass_at_k_equals_the_average_over_all_sets(sizes, data):
    k = data.draw(st.integers(1, 6))
    groups = [g for g, size in enumerate(sizes) for _ in range(size)]
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=len(groups), max_size=len(groups)))
    rollouts = list(zip(rewards, groups, groups, strict=True))
    found = pass_at_k(torch.tensor(rewards, dtype=F64), torch.tensor(groups), k=k).tolist()
    expected = by_group(rollouts, lambda r, _: slow_pass_at_k(r, k))
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
def test_where_every_set_passes_or_none_does_pass_at_k_is_zero(rewards):
    assert pass_at_k(torch.tensor(rewards), torch.zeros(3, dtype=torch.long), k=2).tolist() == [0.0] * 3


def test_success_counts_from_the_reward_that_is_asked_for():
    rewards, groups = torch.tensor([0.5, 0.4, 0.0, 0.0]), torch.zeros(4, dtype=torch.long)
    assert pass_at_k(rewards, groups, k=2, success_reward=0.5).tolist() == pytest.approx([1] + [-1 / 3] * 3, abs=1e-6)
    assert pass_at_k(rewards, groups, k=2).tolist() == [0.0] * 4


def test_pass_at_k_of_a_large_group_does_not_overflow():
    # C(2000, 900) has some 600 digits. One success: a set of 900 holds it with probability 900 / 2000 = .45:
    # (1 - .45) / sqrt(.45 x .55) = 1.1055
    rewards = torch.zeros(2000)
    rewards[7] = 1.0
    found = pass_at_k(rewards, torch.zeros(2000, dtype=torch.long), k=900)
    assert found.isfinite().all()
    assert found[7].item() == pytest.approx(1.1055, abs=1e-4)


@pytest.mark.parametrize("k", [0, -1])
def test_a_k_below_1_is_refused(k):
    with pytest.raises(ValueError, match=rf"k must be >= 1, got {k}"):
        pass_at_k(torch.zeros(5), torch.tensor([0, 0, 1, 1, 1]), k=k)


def test_a_group_with_one_set_of_k_or_none_gives_zero_and_leaves_the_others_alone():
    # groups of 1, 2 and 3 beside the one that is worked by hand above, k = 2 and 3
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    groups = torch.tensor([5, 6, 6, 7, 7, 7, 8, 8, 8, 8])
    assert pass_at_k(rewards, groups, k=3)[:6].tolist() == [0.0] * 6
    found = pass_at_k(rewards, groups, k=2)
    assert found[:3].tolist() == [0.0] * 3
    assert found[6:].tolist() == pytest.approx([1.0, -0.33333, -0.33333, -0.33333], abs=1e-5)
    assert found[3].item() > 0


@seeded
@given(st.integers(2, 60), st.data())
def test_pass_at_k_sums_to_zero_in_a_group(size, data):
    k, successes = data.draw(st.integers(1, size - 1)), data.draw(st.integers(0, size))
    rewards = torch.tensor([1.0] * successes + [0.0] * (size - successes), dtype=F64)
    found = pass_at_k(rewards, torch.zeros(size, dtype=torch.long), k=k)
    assert abs(found.sum().item()) <= 1e-9 * max(1.0, found.abs().sum().item())
    if 0 < successes <= size - k:
        assert found[0] > 0 > found[-1]


@seeded
@given(st.lists(st.booleans(), min_size=2, max_size=40))
def test_pass_at_1_is_the_distance_from_the_mean_in_population_deviations(passed):
    rewards = [float(p) for p in passed]
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
    expected = [(r - mean) / std if std else 0.0 for r in rewards]
    found = pass_at_k(torch.tensor(rewards, dtype=F64), torch.zeros(len(rewards), dtype=torch.long), k=1)
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


# ---- GDPO ------------------------------------------------------------------------------------------------------------


def test_gdpo_by_hand():
    # Part one, 1 0 1 0 | part two, 0 0 30 30: both have sample deviations, .57735 and 17.3205: +-.866025 each.
    # Sums 0, -1.73205, 1.73205, 0: mean 0, sample deviation sqrt(6 / 3) = 1.414214: 0, -1.224745, 1.224745, 0
    parts = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 30.0], [0.0, 30.0]], dtype=F64)
    found = gdpo(parts, torch.zeros(4, dtype=torch.long))
    assert found.tolist() == pytest.approx([0.0, -1.224745, 1.224745, 0.0], abs=2e-6)


def slow_gdpo(parts, groups, eps):
    totals = [0.0] * len(parts)
    for rows in rows_of_groups(groups):
        for column in range(len(parts[0])):
            values = [parts[i][column] for i in rows]
            mean = math.fsum(values) / len(values)
            std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))
            for i in rows:
                totals[i] += (parts[i][column] - mean) / (std + eps)
    mean = math.fsum(totals) / len(totals)
    variance = math.fsum((t - mean) ** 2 for t in totals) / max(len(totals) - 1, 1)
    return [(t - mean) / math.sqrt(variance + 1e-8) for t in totals]


@seeded
@given(
    st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64), st.integers(0, 3)), min_size=1, max_size=12),
    st.sampled_from([1e-6, 0.5]),
)
def test_gdpo_equals_the_slow_reference(rows, eps):
    parts, groups = [[a / 64, b / 8] for a, b, _ in rows], [g for *_, g in rows]
    found = gdpo(torch.tensor(parts, dtype=F64), torch.tensor(groups), std_eps=eps).tolist()
    # sums that cancel to a rounding error are divided by sqrt(1e-8): 1e-16 x 1e4
    assert found == pytest.approx(slow_gdpo(parts, groups, eps), rel=1e-9, abs=1e-9)


def test_a_part_of_small_spread_counts_as_much_as_one_of_large_spread():
    groups = torch.zeros(4, dtype=torch.long)
    parts = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 3.0], [0.0, 3.0]], dtype=F64)
    scaled = gdpo(parts * torch.tensor([1.0, 1000.0], dtype=F64), groups, std_eps=1e-12)
    assert torch.allclose(scaled, gdpo(parts, groups, std_eps=1e-12), rtol=1e-9, atol=1e-9)


def test_gdpo_of_one_part_of_one_group_is_grpo():
    # normalised values have mean 0 and sample deviation 1 already
    rewards, groups = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=F64), torch.zeros(4, dtype=torch.long)
    found = gdpo(rewards[:, None], groups)
    assert torch.allclose(found, group_advantages(rewards, groups), rtol=0, atol=1e-6)  # std_eps of either


def test_a_part_that_is_equal_in_a_group_adds_exactly_nothing():
    parts = torch.tensor([[0.1, 1.0], [0.1, 0.0], [0.1, 2.0]])
    groups = torch.zeros(3, dtype=torch.long)
    assert torch.equal(gdpo(parts, groups), gdpo(parts[:, 1:], groups))


def test_a_weight_counts_after_the_division():
    # One group of two: each part is +-.707107 whatever its spread. Weights 1 and .25, opposite signs: .707107 x .75, which
    # whitening brings to +-.707107 over two rollouts; over four, with a group in which the parts agree (1.25):
    # [.75, -.75, 1.25, -1.25] / sqrt(4.25 / 3) = .630126, -.630126, 1.050210, -1.050210
    groups = torch.tensor([0, 0, 1, 1])
    parts = torch.tensor([[1.0, 0.0], [0.0, 9.0], [1.0, 9.0], [0.0, 0.0]], dtype=F64)
    found = gdpo(parts, groups, torch.tensor([1.0, 0.25], dtype=F64), std_eps=1e-12)
    assert found.tolist() == pytest.approx([0.630126, -0.630126, 1.050210, -1.050210], abs=1e-6)
    ones = torch.ones(2, dtype=F64)
    assert torch.equal(gdpo(parts, groups, ones), gdpo(parts, groups))


def test_weights_that_are_not_one_for_each_part_are_refused():
    with pytest.raises(ValueError, match="part_weights must be one for each of 2 rewards"):
        gdpo(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long), torch.ones(3))


@pytest.mark.parametrize("shape", [(4,), (4, 0), (4, 2, 1)])
def test_parts_that_are_no_table_are_refused(shape):
    with pytest.raises(ValueError, match="reward_parts must be N x K"):
        gdpo(torch.zeros(shape), torch.zeros(4, dtype=torch.long))


# ---- what all of them share ------------------------------------------------------------------------------------------


@every_advantage
@pytest.mark.parametrize("reward, size", [(0.35, 8), (0.1, 7), (0.7, 16)])
def test_equal_rewards_give_exactly_zero(call, reward, size):
    # case 8
    rewards, groups = torch.full((size,), reward), torch.zeros(size, dtype=torch.long)
    assert call(rewards, groups, torch.full((size,), 3)).tolist() == [0.0] * size


@every_advantage
def test_a_group_of_one_gives_zero(call):
    # case 9
    assert call(torch.tensor([7.0]), torch.tensor([5]), torch.tensor([3])).tolist() == [0.0]


@every_advantage
@seeded
@given(rollouts=ROLLOUTS, data=st.data())
def test_order_and_names_of_groups_do_not_matter(call, rollouts, data):
    rewards, groups, lengths = tensors(rollouts)
    order = torch.tensor(data.draw(st.permutations(range(len(rollouts)))))
    names = torch.tensor([10**12, -3, 0, 77])
    again = call(rewards[order], names[groups[order]], lengths[order])
    # sums in another order; gdpo divides what is left of them by sqrt(1e-8)
    assert torch.allclose(again, call(rewards, groups, lengths)[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("call", CALLS[:4], ids=["rloo", "opo", "maxrl", "pass_at_k"])
@seeded
@given(rollouts=ROLLOUTS)
def test_other_groups_do_not_change_a_group(call, rollouts):
    rewards, groups, lengths = tensors(rollouts)
    whole = call(rewards, groups, lengths)
    for g in groups.unique():
        rows = groups == g
        assert torch.allclose(call(rewards[rows], groups[rows], lengths[rows]), whole[rows], rtol=1e-12, atol=1e-12)


@every_advantage
def test_float32_stays_float32_and_carries_no_gradient(call):
    rewards, groups, lengths = tensors(MIXED, dtype=torch.float32)
    found = call(rewards.requires_grad_(), groups, lengths)
    assert not found.requires_grad
    assert found.dtype == (F64 if call is gdpo_of else torch.float32)  # its parts here are float64


@every_advantage
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(call, bad):
    with pytest.raises(ValueError, match="finite"):
        call(torch.tensor([1.0, bad]), torch.tensor([0, 0]), torch.tensor([1, 1]))


@every_advantage
def test_groups_of_another_length_are_refused(call):
    with pytest.raises(ValueError, match="one length"):
        call(torch.zeros(3), torch.zeros(2, dtype=torch.long), torch.ones(3, dtype=torch.long))


@pytest.mark.parametrize("lengths", [[3, 0], [3, -1], [3]])
def test_lengths_that_do_not_fit_are_refused(lengths):
    with pytest.raises(ValueError, match="lengths must be positive and as many as rewards"):
        opo(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor(lengths))


def test_what_maxrl_cannot_divide_by_is_refused():
    groups = torch.tensor([0, 0])
    with pytest.raises(ValueError, match=r"rewards must be >= 0 for maxrl, got -0\.5"):
        maxrl(torch.tensor([1.0, -0.5]), groups)
    for eps in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="mean_eps must be > 0"):
            maxrl(torch.tensor([1.0, 0.0]), groups, mean_eps=eps)
