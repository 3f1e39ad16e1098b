"""Length penalties: what a response pays, and where the payment shows."""

import dataclasses

import pytest
from rewards.written_rollouts import make_rollout

from strop.config.filtering import NoLengthPenaltyOptions, PerTokenPenaltyOptions, SoftOverlongOptions
from strop.rewards.length_penalty import penalise, per_token, soft_overlong
from strop.types import RewardError


def rollout(num_tokens, reward, parts=None):
    mask = (False,) + (True,) * num_tokens
    return dataclasses.replace(
        make_rollout("x"), tokens=(5, *range(num_tokens)), response_mask=mask, reward=reward, reward_parts=parts
    )


def test_soft_overlong_has_the_values_of_the_paper_s_own_lengths():
    """DAPO: at most 20480 tokens, the last 4096 of them punished. 16384 is free; 2048 above it is half of 4096."""
    lengths = {1: 0.0, 16384: 0.0, 16385: -1 / 4096, 18432: -0.5, 20480: -1.0, 20481: -1.0, 99999: -1.0}
    for length, value in lengths.items():
        assert soft_overlong(length, max_response_tokens=20480, buffer_tokens=4096, penalty_coef=1.0) == value


@pytest.mark.parametrize("limit, buffer", [(7, 1), (7, 3), (7, 7), (20, 4)])
def test_soft_overlong_is_equation_13_at_every_length(limit, buffer):
    for length in range(1, limit + 3):
        if length <= limit - buffer:
            expected = 0.0
        elif length <= limit:
            expected = ((limit - buffer) - length) / buffer
        else:
            expected = -1.0
        found = soft_overlong(length, max_response_tokens=limit, buffer_tokens=buffer, penalty_coef=0.5)
        assert found == pytest.approx(0.5 * expected, abs=1e-12)


def test_per_token_counts_tokens_above_the_target_alone():
    """3 tokens above 5 at 0.25 each: 0.75."""
    assert [per_token(n, target_tokens=5, penalty_coef=0.25) for n in (1, 5, 6, 8)] == [0.0, 0.0, -0.25, -0.75]


def test_the_penalty_is_taken_from_the_reward_and_both_are_told():
    """Limit 10, buffer a fifth of it: 2. Lengths 8, 9, 10 pay 0, 1/2, 1 of coefficient 2; rewards 1, 1, 0."""
    given = [rollout(8, 1.0), rollout(9, 1.0), rollout(10, 0.0)]
    found, metrics = penalise(given, SoftOverlongOptions(penalty_coef=2.0), max_response_tokens=10)
    assert [r.reward for r in found] == [1.0, 0.0, -2.0]
    assert [r.length_penalty for r in found] == [0.0, -1.0, -2.0]
    assert metrics["length_penalty"].value == pytest.approx(-1.0)
    assert metrics["reward/after_penalty"].value == pytest.approx(-1 / 3)


def test_without_a_penalty_rollouts_stay_as_they_are():
    given = [rollout(9, 1.0)]
    assert penalise(given, NoLengthPenaltyOptions(), max_response_tokens=10) == (given, {})


def test_a_rollout_without_a_score_gets_none_through_its_penalty():
    found, metrics = penalise(
        [rollout(10, None), rollout(10, 1.0)], PerTokenPenaltyOptions(penalty_coef=0.1), max_response_tokens=10
    )
    assert found[0].reward is found[0].length_penalty is None
    assert metrics["reward/after_penalty"].count == 1


def test_among_named_rewards_the_penalty_is_one_of_its_own():
    given = [rollout(7, 3.0, {"right": 1.0, "style": 2.0})]
    found, _ = penalise(given, PerTokenPenaltyOptions(target_tokens=5, penalty_coef=0.5), max_response_tokens=10)
    assert found[0].reward_parts == {"right": 1.0, "style": 2.0, "length_penalty": -1.0}
    assert found[0].reward == sum(found[0].reward_parts.values()) == 2.0


def test_a_scorer_s_own_reward_of_that_name_is_refused():
    given = [rollout(7, 1.0, {"length_penalty": 1.0})]
    with pytest.raises(RewardError, match="named rewards must not be called length_penalty"):
        penalise(given, PerTokenPenaltyOptions(), max_response_tokens=10)
