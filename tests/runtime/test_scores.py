"""Scores of an evaluation, against slow references and values worked by hand."""

import math
from itertools import combinations

import pytest

from strop.runtime.scores import estimate, majority_success, pass_at_k, score_answers
from strop.types import Prompt, Rollout


def answers(row, said, *, source=None, cut=()):
    """Rollouts of one prompt from (text, reward) pairs."""
    prompt = Prompt(row=row, tokens=(5,), text="q", source=source)
    return [
        Rollout(
            *(prompt, row, i, (5, *[9] * len(text), 1), (False, *[True] * (len(text) + 1)), (0.0,) * (len(text) + 2)),
            policy_versions=(0,) * (len(text) + 2),
            finish_reason="length" if i in cut else "stop",
            text=text,
            reward=reward,
        )
        for i, (text, reward) in enumerate(said)
    ]


def text_of(rollout):
    return rollout.text or None


def scored(rollouts, num_samples, success_reward=1.0):
    return score_answers(rollouts, num_samples=num_samples, success_reward=success_reward, answer_key=text_of)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_all_subsets_of_k_samples_with_a_success_in_them(n):
    for c in range(n + 1):
        samples = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = list(combinations(samples, k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-12), (n, c, k)


def test_pass_at_k_stays_exact_for_many_samples():
    """1 - (199/200)(198/199)...: with one success of 200 it is k / 200; the terms of a naive quotient exceed a float."""
    assert pass_at_k(2000, 1, 500) == pytest.approx(0.25, rel=1e-12)


def test_pass_at_k_of_a_set_is_the_mean_over_prompts_for_each_power_of_2_and_all_samples():
    """Six samples: prompt 0 has 3 successes, prompt 1 none. pass@2: 1 - 3/15 and 0; pass@4: 1 (at most 3 fail) and 0."""
    rollouts = answers(0, [("a", 1.0), ("b", 0.0)] * 3) + answers(1, [("c", 0.0)] * 6)
    found = scored(rollouts, 6).pass_at
    assert list(found) == [1, 2, 4, 6]
    assert [e.value for e in found.values()] == pytest.approx([0.25, (1 - 3 / 15) / 2, 0.5, 0.5])


def test_a_success_is_a_reward_of_success_reward_or_more():
    rollouts = answers(0, [("a", 0.4), ("b", 0.5), ("c", 0.9), ("d", -1.0)])
    assert [scored(rollouts, 4, least).pass_at[1].value for least in (1.0, 0.5, 0.4, -1.0)] == [0.0, 0.5, 0.75, 1.0]


def test_answers_without_a_reward_are_left_out_and_prompts_with_too_few_of_pass_at_k():
    rollouts = answers(0, [("a", None), ("b", 1.0)]) + answers(1, [("a", 0.0), ("b", 1.0)])
    found = scored(rollouts, 2)
    assert (found.num_excluded, found.num_prompts, found.reward) == (1, 2, 0.75)
    assert (found.pass_at[1].num_prompts, found.pass_at[1].value) == (2, 0.75)
    assert (found.pass_at[2].num_prompts, found.pass_at[2].value) == (1, 1.0)


@pytest.mark.parametrize(
    "said, wanted",
    [
        ([("7", 1.0), ("8", 0.0), ("7", 1.0)], 1.0),
        ([("7", 1.0), ("8", 0.0), ("8", 0.0)], 0.0),
        ([("8", 0.0), ("7", 1.0), ("7", 1.0), ("8", 0.0)], 0.0),  # a tie goes to the earliest
        ([("7", 1.0), ("8", 0.0), ("8", 0.0), ("7", 1.0)], 1.0),
        ([("", 0.0), ("", 0.0), ("7", 1.0)], 1.0),  # without an answer there is no vote
        ([("", 1.0), ("", 1.0)], 0.0),
    ],
)
def test_the_majority_is_the_answer_that_most_samples_share(said, wanted):
    assert majority_success(answers(0, said), [reward >= 1 for _, reward in said], text_of) == wanted
    assert scored(answers(0, said), len(said)).maj_at[len(said)].value == wanted


def test_greedy_answers_have_neither_pass_at_k_nor_a_majority():
    found = scored(answers(0, [("7", 1.0)]), 0)
    assert (found.pass_at, found.maj_at) == ({}, {})
    assert scored(answers(0, [("7", 1.0)]), 1).maj_at == {}  # nothing to vote about


def test_the_interval_of_shares_is_wilson_s():
    """The ends solve |share - p| = z sqrt(p (1 - p) / n); found here by bisection. 0 of 10: high = z^2 / (10 + z^2)."""
    z = 1.959964
    for count, total in ((0, 10), (3, 10), (10, 10), (7, 8)):
        found = estimate([1.0] * count + [0.0] * (total - count))
        share = count / total
        for end, outside in ((found.low, 0.0), (found.high, 1.0)):
            far, near = outside, share
            for _ in range(200):
                middle = (far + near) / 2
                is_inside = abs(share - middle) <= z * math.sqrt(middle * (1 - middle) / total)
                far, near = (far, middle) if is_inside else (middle, near)
            assert end == pytest.approx(near, abs=1e-9), (count, total)
    assert estimate([0.0] * 10).high == pytest.approx(z * z / (10 + z * z), rel=1e-12)


def test_the_interval_of_other_means_is_1_96_standard_errors_over_prompts():
    """0, 1, 2: mean 1, variance (1 + 0 + 1) / 2 = 1, standard error sqrt(1/3)."""
    found = estimate([0.0, 1.0, 2.0])
    assert (found.value, found.num_prompts) == (1.0, 3)
    assert found.high - 1 == pytest.approx(1.96 * math.sqrt(1 / 3), rel=1e-4)
    assert 1 - found.low == pytest.approx(found.high - 1, rel=1e-12)


def test_the_interval_of_values_within_0_and_1_stays_there():
    """0, 1/2, 1: 1/2 -+ 1.96 sqrt(1/12) = 1/2 -+ .566."""
    found = estimate([0.0, 0.5, 1.0])
    assert (found.low, found.value, found.high) == (0.0, 0.5, 1.0)


def test_samples_of_one_prompt_are_no_independent_evidence():
    """Four equal answers to each of two prompts say no more than one each."""
    many = scored(answers(0, [("a", 0.25)] * 4) + answers(1, [("a", 0.75)] * 4), 4)
    one = scored(answers(0, [("a", 0.25)]) + answers(1, [("a", 0.75)]), 1)
    assert (many.reward, many.low, many.high) == (one.reward, one.low, one.high)


def test_nothing_scored_gives_nan_and_one_prompt_no_interval():
    empty = scored(answers(0, [("a", None)]), 1)
    assert math.isnan(empty.reward)
    assert (empty.num_prompts, empty.num_excluded) == (0, 1)
    assert estimate([0.3]).low == -math.inf


def test_lengths_and_cut_answers_count_all_answers_and_sources_the_prompts():
    rollouts = answers(0, [("abc", 1.0), ("a", 0.0)], source="x", cut=(1,)) + answers(1, [("", 1.0)] * 2, source="y")
    found = scored(rollouts, 2)
    assert found.response_tokens == (4 + 2 + 1 + 1) / 4
    assert found.truncated == 0.25
    assert found.reward_of == {"x": 0.5, "y": 1.0}
