"""GRPO with rewards for steps: normalised over the group, summed from the token's step on."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.ops.advantages import group_advantages, process_advantages

F64 = torch.float64
seeded = settings(derandomize=True, deadline=None, max_examples=60)
GRID = st.integers(-128, 128).map(lambda x: x / 64)
# the group of each rollout and its tokens as (reward, ends a step, is trainable)
ROLLOUTS = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.tuples(GRID, st.booleans(), st.booleans()), max_size=6)),
    min_size=1,
    max_size=6,
)


def flat(rollouts, *, planted=None):
    """Rewards, steps, groups, mask and ids; `planted` stands where no reward is read."""
    rows = [(s, *token) for s, (_, tokens) in enumerate(rollouts) for token in tokens]
    rewards = [r if (step and m) or planted is None else planted for _, r, step, m in rows]
    return (
        torch.tensor(rewards, dtype=F64),
        torch.tensor([step for _, _, step, _ in rows], dtype=torch.bool),
        torch.tensor([group for group, _ in rollouts], dtype=torch.long),
        torch.tensor([m for *_, m in rows], dtype=torch.bool),
        torch.tensor([s for s, *_ in rows], dtype=torch.long),
    )


def slow(rollouts, *, normalize_std, std_eps):
    """Python loops over groups, rollouts and tokens."""
    found = []
    for group, tokens in rollouts:
        others = [[r for r, step, m in row if step and m] for g, row in rollouts if g == group]
        steps = [r for row in others for r in row]
        is_nothing = sum(bool(row) for row in others) < 2 or len(set(steps)) < 2
        mean = math.fsum(steps) / max(len(steps), 1)
        deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in steps) / max(len(steps) - 1, 1))
        scale = deviation + std_eps if normalize_std else 1.0
        for place, (_, _, is_trainable) in enumerate(tokens):
            later = [(r - mean) / scale for r, step, m in tokens[place:] if step and m]
            found.append(math.fsum(later) if is_trainable and not is_nothing else 0.0)
    return found


def test_step_rewards_by_hand():
    # Steps .., 1 | 0, . and 0, 1, 0 of one group: rewards 1, 0 and 0, 1, 0; mean .4, squares .36 x 2 + .16 x 3 = 1.2,
    # deviation sqrt(1.2 / 4) = .547723; a 1 becomes 1.095445, a 0 becomes -.730297.
    # First rollout, tokens [-, 1, 0, -]: .365148, .365148, -.730297, 0. Second: -.365148, .365148, -.730297.
    first = [(0.0, False, True), (1.0, True, True), (0.0, True, True), (0.0, False, True)]
    second = [(0.0, True, True), (1.0, True, True), (0.0, True, True)]
    found = process_advantages(*flat([(7, first), (7, second)]), std_eps=1e-12)
    expected = [0.365148, 0.365148, -0.730297, 0.0, -0.365148, 0.365148, -0.730297]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_step_that_earns_0_is_a_step_and_a_token_without_a_reward_is_none():
    # Two steps of reward 1 and 0: mean .5. With the other two tokens as steps of 0 the mean is .25.
    tokens = [[(1.0, True, True), (0.0, False, True)], [(0.0, True, True), (0.0, False, True)]]
    sparse = process_advantages(*flat([(0, row) for row in tokens]), normalize_std=False)
    assert sparse.tolist() == [0.5, 0.0, -0.5, 0.0]
    dense = [[(r, True, m) for r, _, m in row] for row in tokens]
    assert process_advantages(*flat([(0, row) for row in dense]), normalize_std=False).tolist() == [
        0.5,
        -0.25,
        -0.5,
        -0.25,
    ]


@pytest.mark.parametrize("normalize_std", [True, False])
@seeded
@given(rollouts=ROLLOUTS)
def test_equals_the_slow_reference(normalize_std, rollouts):
    options = {"normalize_std": normalize_std, "std_eps": 0.25}
    found = process_advantages(*flat(rollouts), **options)
    assert found.tolist() == pytest.approx(slow(rollouts, **options), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("normalize_std", [True, False])
@seeded
@given(st.lists(st.tuples(st.integers(0, 2), GRID, st.integers(1, 4)), min_size=1, max_size=6))
def test_one_step_at_the_last_token_gives_the_advantage_of_the_group(normalize_std, rows):
    rollouts = [(g, [(0.0, False, True)] * (n - 1) + [(r, True, True)]) for g, r, n in rows]
    rewards, _, groups, _, ids = flat(rollouts)
    by_rollout = group_advantages(torch.tensor([r for _, r, _ in rows], dtype=F64), groups, normalize_std=normalize_std)
    found = process_advantages(*flat(rollouts), normalize_std=normalize_std)
    assert torch.allclose(found, by_rollout[ids], rtol=1e-12, atol=1e-12)
    assert rewards.shape == found.shape


@pytest.mark.parametrize("value, steps", [(0.35, 8), (0.1, 7), (0.7, 16)])
def test_equal_step_rewards_give_exactly_0(value, steps):
    # case 8
    found = process_advantages(*flat([(0, [(value, True, True)] * steps), (0, [(value, True, True)])]))
    assert not found.any()


def test_a_rollout_that_alone_has_steps_is_no_baseline_of_its_own():
    lonely = [(1.0, True, True), (0.0, True, True)]
    assert not process_advantages(*flat([(0, lonely), (1, [(2.0, True, True)])])).any()
    # case 13: beside an empty response, or one without a step, it is still alone
    assert not process_advantages(*flat([(0, lonely), (0, []), (0, [(5.0, False, True)])])).any()


@seeded
@given(ROLLOUTS)
def test_what_stands_where_no_reward_is_read_changes_nothing(rollouts):
    assert torch.equal(process_advantages(*flat(rollouts)), process_advantages(*flat(rollouts, planted=math.nan)))


@seeded
@given(ROLLOUTS)
def test_an_empty_response_and_masked_tokens_change_nobodys_advantage(rollouts):
    # case 13
    found = process_advantages(*flat(rollouts))
    more = [*rollouts, (0, []), (0, [(9.0, True, False)] * 3)]
    assert torch.equal(process_advantages(*flat(more))[: len(found)], found)


@seeded
@given(ROLLOUTS)
def test_the_order_of_rollouts_does_not_matter(rollouts):
    lengths = [len(tokens) for _, tokens in rollouts]
    forward = list(process_advantages(*flat(rollouts)).split(lengths))
    backward = process_advantages(*flat(rollouts[::-1]))
    assert torch.allclose(backward, torch.cat(forward[::-1]), rtol=1e-9, atol=1e-9)


def test_a_step_reward_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="must be finite"):
        process_advantages(*flat([(0, [(math.nan, True, True)]), (0, [(1.0, True, True)])]))


def test_different_shapes_are_refused():
    mask = torch.ones(2, dtype=torch.bool)
    with pytest.raises(ValueError, match="must share a shape"):
        process_advantages(torch.zeros(3), mask, torch.zeros(1).long(), mask, torch.zeros(2).long())
