"""Which answers are the same for maj@k."""

import pytest

from strop.config.sampling import (
    DatasetRewardOptions,
    ExactRewardOptions,
    FunctionRewardOptions,
    MathRewardOptions,
    NumberRewardOptions,
)
from strop.rewards import answer_key
from strop.types import Prompt, Rollout


def said(text, reason="stop"):
    return Rollout(Prompt(0, (5,), ""), 0, 0, (5, 9), (False, True), (0.0, -0.5), (-1, 0), reason, text=text)


NUMBER, MATHS, EXACT = NumberRewardOptions(), MathRewardOptions(), ExactRewardOptions()
FUNCTION = FunctionRewardOptions(function="m:f")


@pytest.mark.parametrize(
    "options, one, other, same",
    [
        (NUMBER, "3 + 4 = 7", "the sum is $7.00.", True),
        (NUMBER, "7", "-7", False),
        (NUMBER, "1,000", "1e3", True),
        (MATHS, r"so \boxed{42}", "6 * 7 = 42\n#### 42 apples", True),
        (MATHS, r"\boxed{$\frac{1}{2}$}", r"thus \boxed{ \frac{1} {2} }", True),
        (MATHS, r"\boxed{1} and 2", r"\boxed{3} and 2", False),
        (MATHS, "it is 42", r"\boxed{42.0}", True),
        (MATHS, "it is x", "it is y", False),
        (EXACT, " abc\n", "abc", True),
        (EXACT, "abc", "abd", False),
        (ExactRewardOptions(strip=False), " abc", "abc", False),
        (FUNCTION, "so 7", "is 7", False),
        (FUNCTION, "so 7\n", "so 7", True),
        (DatasetRewardOptions(), " 7", "7", True),
    ],
)
def test_two_answers_are_the_same_as_their_scorer_reads_them(options, one, other, same):
    key = answer_key(options)
    assert (key(said(one)) == key(said(other))) == same


@pytest.mark.parametrize(
    "options, rollout",
    [(NUMBER, said("no idea")), (MATHS, said(" ")), (EXACT, said("abc", "length")), (FUNCTION, said("\n"))],
)
def test_a_response_without_a_final_answer_has_none(options, rollout):
    assert answer_key(options)(rollout) is None


def test_an_empty_response_that_ended_by_itself_is_an_exact_answer():
    assert answer_key(EXACT)(said("")) == ""
