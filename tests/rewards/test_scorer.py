"""Scorers: every rollout ends with a finite reward, or without one and with a reason that is counted."""

import dataclasses
import logging
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from written_rollouts import make_rollout

from strop.config.sampling import ExactRewardOptions, FunctionRewardOptions, MathRewardOptions, NumberRewardOptions
from strop.rewards import make_scorer
from strop.types import RewardError


@pytest.fixture
def score_with(tmp_path):
    """Scores four rollouts of two prompts with a function that is written to a file, as a user would."""

    def score(source, *, texts=("a", "b", "c", "d"), **options):
        path = tmp_path / "score.py"
        path.write_text(source)
        scorer = make_scorer(FunctionRewardOptions(function=f"{path}:score", num_workers=0, **options))
        return scorer([make_rollout(text, row=i // 2, sample=i % 2) for i, text in enumerate(texts)])

    return score


def rewards(scored):
    return [(rollout.reward, rollout.excluded) for rollout in scored.rollouts]


def metrics(scored):
    """Those that are not 0, and these two."""
    always = ("reward/num_errors", "reward/num_excluded")
    return {name: m.value for name, m in scored.metrics.items() if m.value or name in always}


@pytest.mark.parametrize("returned", ["[1.0]", "[1.0, 2.0, 3.0]", "[]", "[1.0] * 5"])
@pytest.mark.parametrize("on_error", ["fail", "zero", "exclude"])
def test_a_wrong_number_of_scores_is_an_error_with_name_and_both_counts(score_with, returned, on_error):
    message = rf"score\.py:score must return one score .*got {len(eval(returned))} scores for 4 rollouts"
    with pytest.raises(RewardError, match=message):
        score_with(f"def score(rollouts): return {returned}", batched=True, on_error=on_error)


@pytest.mark.parametrize("returned", ["1.0", "None", "'abcd'", "{1: 2, 3: 4, 5: 6, 7: 8}"])
def test_a_batched_function_must_return_a_list(score_with, returned):
    with pytest.raises(RewardError, match=r"score\.py:score must return a list .* for 4 rollouts"):
        score_with(f"def score(rollouts): return {returned}", batched=True, on_error="zero")


@pytest.mark.parametrize("returned", ["[1, None, 0, None]", "(1.0, None, 0.0, None)"])
def test_none_leaves_a_rollout_out_without_being_an_error(score_with, returned):
    scored = score_with(f"def score(rollouts): return {returned}", batched=True)
    assert rewards(scored) == [(1.0, None), (None, "no_score"), (0.0, None), (None, "no_score")]
    assert metrics(scored) == {"reward/num_errors": 0, "reward/num_excluded": 2}
    assert all(type(reward) is float for reward, _ in rewards(scored) if reward is not None)


def test_an_array_of_scores_is_a_list_of_scores(score_with):
    for source in (
        "import numpy as np\ndef score(r): return np.arange(4)",
        "import torch\ndef score(r): return torch.arange(4.)",
    ):
        assert rewards(score_with(source, batched=True)) == [(0.0, None), (1.0, None), (2.0, None), (3.0, None)]


RAISES = "def score(rollout):\n    return 1 / (rollout.text != 'b')"


def test_an_exception_stops_with_name_row_and_cause_when_errors_fail(score_with):
    with pytest.raises(RewardError, match=r"score\.py:score .*raised ZeroDivisionError.* row 0, sample 1") as caught:
        score_with(RAISES)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_exception_scores_zero_or_leaves_out_and_is_counted(score_with):
    zero = score_with(RAISES, on_error="zero")
    assert rewards(zero) == [(1.0, None), (0.0, None), (1.0, None), (1.0, None)]
    assert metrics(zero) == {"reward/num_errors": 1, "reward/num_excluded": 0}
    excluded = score_with(RAISES, on_error="exclude")
    assert rewards(excluded) == [(1.0, None), (None, "scorer_error"), (1.0, None), (1.0, None)]
    assert metrics(excluded) == {"reward/num_errors": 1, "reward/num_excluded": 1}


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')", "-float('inf')", "10**400"])
def test_a_score_that_is_not_finite_follows_the_same_policy(score_with, value):
    source = f"def score(rollout):\n    return {value} if rollout.text == 'b' else 1"
    with pytest.raises(
        RewardError, match=r"must return a finite number.*returned (nan|-?inf) for prompt row 0, sample 1"
    ):
        score_with(source)
    assert rewards(score_with(source, on_error="zero"))[1] == (0.0, None)
    scored = score_with(source, on_error="exclude")
    assert rewards(scored)[1] == (None, "nan_score")
    assert metrics(scored) == {"reward/num_errors": 1, "reward/num_excluded": 1}


def test_a_batch_that_raises_counts_every_rollout(score_with):
    scored = score_with("def score(rollouts): raise KeyError('x')", batched=True, on_error="exclude")
    assert rewards(scored) == [(None, "scorer_error")] * 4
    assert metrics(scored) == {"reward/num_errors": 4, "reward/num_excluded": 4}


@pytest.mark.parametrize("on_error", ["fail", "zero"])
def test_the_traceback_of_the_first_error_is_logged_once_per_scorer(tmp_path, caplog, on_error):
    path = tmp_path / "score.py"
    path.write_text(RAISES)
    scorer = make_scorer(FunctionRewardOptions(function=f"{path}:score", on_error=on_error))
    with caplog.at_level(logging.WARNING, logger="strop"):
        for _ in range(2):
            try:
                scorer([make_rollout("b"), make_rollout("b")])
            except RewardError:
                assert on_error == "fail"
    assert caplog.text.count("Traceback") == 1
    assert "score.py" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("returned", ["'1'", "[1.0]", "1j", "object()"])
@pytest.mark.parametrize("on_error", ["fail", "exclude"])
def test_what_is_not_a_number_is_an_error_whatever_the_policy(score_with, returned, on_error):
    with pytest.raises(RewardError, match=r"score\.py:score must return a number, or None for no score, got .* row 0"):
        score_with(f"def score(rollout): return {returned}", on_error=on_error)


@pytest.mark.parametrize("batched", [True, False])
def test_several_named_rewards_are_added_and_kept_apart(score_with, batched):
    body = "{'right': 1, 'short': 0.25}"
    scored = score_with(f"def score(r): return {f'[{body}] * len(r)' if batched else body}", batched=batched)
    assert rewards(scored) == [(1.25, None)] * 4
    assert [r.reward_parts for r in scored.rollouts] == [{"right": 1.0, "short": 0.25}] * 4


@pytest.mark.parametrize("failure", ["{'right': 1.0, 'short': float('nan')}", "1 / 0"])
def test_a_failed_score_is_zero_in_each_name_where_others_have_named_rewards(score_with, failure):
    source = f"def score(r): return {{'right': 1, 'short': 0.25}} if r.text == 'c' else {failure}"
    scored = score_with(source, on_error="zero")
    assert rewards(scored) == [(0.0, None), (0.0, None), (1.25, None), (0.0, None)]
    zeros = {"right": 0.0, "short": 0.0}
    assert [r.reward_parts for r in scored.rollouts] == [zeros, zeros, {"right": 1.0, "short": 0.25}, zeros]
    assert metrics(scored)["reward/num_errors"] == 3


def test_a_failed_score_without_names_around_it_is_a_plain_zero(score_with):
    scored = score_with("def score(r): return 1.0 if r.text == 'c' else 1 / 0", on_error="zero")
    assert [r.reward_parts for r in scored.rollouts] == [None] * 4


@pytest.mark.parametrize("on_error", ["fail", "zero", "exclude"])
def test_names_that_are_one_as_text_are_an_error_whatever_the_policy(score_with, on_error):
    message = (
        r"score\.py:score must return named rewards whose names differ as text, got '1' twice in \[1, '1'\] .* row 0"
    )
    with pytest.raises(RewardError, match=message):
        score_with("def score(rollout): return {1: 0.5, '1': 0.25}", on_error=on_error)


@pytest.mark.parametrize("on_error", ["fail", "zero", "exclude"])
def test_an_empty_dict_is_an_error_whatever_the_policy(score_with, on_error):
    with pytest.raises(RewardError, match=r"score\.py:score must return named rewards, got an empty dict .* row 0"):
        score_with("def score(rollout): return {}", on_error=on_error)


@pytest.mark.parametrize("part", ["'1'", "[1.0]", "object()", "{'b': 1.0}"])
@pytest.mark.parametrize("on_error", ["fail", "exclude"])
def test_a_named_reward_that_is_not_a_number_is_an_error_whatever_the_policy(score_with, part, on_error):
    with pytest.raises(RewardError, match=r"score\.py:score must return"):
        score_with(f"def score(rollout): return {{'a': {part}}}", on_error=on_error)


def test_a_named_reward_without_a_score_leaves_the_rollout_without_one(score_with):
    scored = score_with("def score(rollout): return {'a': 1.0, 'b': None if rollout.text == 'b' else 2.0}")
    assert rewards(scored) == [(3.0, None), (None, "no_score"), (3.0, None), (3.0, None)]


@pytest.mark.parametrize("on_error, expected", [("zero", (0.0, None)), ("exclude", (None, "nan_score"))])
@pytest.mark.parametrize("part", ["float('nan')", "float('inf')"])
def test_a_named_reward_that_is_not_finite_is_by_policy(score_with, on_error, expected, part):
    source = f"def score(rollout): return {{'a': 1.0, 'b': {part} if rollout.text == 'b' else 2.0}}"
    assert rewards(score_with(source, on_error=on_error))[1] == expected
    with pytest.raises(RewardError, match="must return a finite number"):
        score_with(source, on_error="fail")


def test_named_rewards_whose_sum_is_not_finite_are_no_score(score_with):
    scored = score_with("def score(rollout): return {'a': 1e308, 'b': 1e308}", on_error="exclude")
    assert rewards(scored) == [(None, "nan_score")] * 4


@pytest.mark.parametrize(
    "value, expected",
    [
        (True, 1.0),
        (2, 2.0),
        (np.float32(0.5), 0.5),
        (np.array(0.5), 0.5),
        (np.bool_(True), 1.0),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (Fraction(1, 2), 0.5),
        (Decimal("0.5"), 0.5),
    ],
)
def test_numbers_of_other_libraries_are_numbers(monkeypatch, value, expected):
    monkeypatch.setattr(math, "strop_score", lambda rollout: value, raising=False)
    options = FunctionRewardOptions(function="math:strop_score", num_workers=0)
    (rollout,) = make_scorer(options)([make_rollout("a")]).rollouts
    assert rollout.reward == expected
    assert type(rollout.reward) is float


def test_a_rollout_changes_in_nothing_but_reward_and_reason():
    rollout = make_rollout("5", "5")
    (scored,) = make_scorer(ExactRewardOptions())([rollout]).rollouts
    assert scored == dataclasses.replace(rollout, reward=1.0)
    assert rollout.reward is None


def test_a_rollout_that_is_excluded_already_is_passed_through_unscored():
    aborted = make_rollout("5", "5", excluded="aborted")
    scored = make_scorer(ExactRewardOptions())([make_rollout("5", "5"), aborted, make_rollout("4", "5")])
    assert rewards(scored) == [(1.0, None), (None, "aborted"), (0.0, None)]
    assert metrics(scored) == {"reward/num_errors": 0, "reward/num_excluded": 1}


@pytest.mark.parametrize("batched", [True, False])
def test_no_rollouts_give_no_scores(score_with, batched):
    scored = score_with("def score(rollouts): return 1 / 0", texts=(), batched=batched)
    assert scored.rollouts == ()
    assert metrics(scored) == {"reward/num_errors": 0, "reward/num_excluded": 0}


@pytest.mark.parametrize("options", [ExactRewardOptions(), NumberRewardOptions(), MathRewardOptions()])
def test_only_what_the_policy_wrote_is_scored(options):
    told = make_rollout("I do not know", "42", prompt=r"The answer is \boxed{42}, say 42. #### 42")
    (rollout,) = make_scorer(options)([told]).rollouts
    assert rollout.reward == 0.0


@pytest.mark.parametrize("options", [ExactRewardOptions, NumberRewardOptions, MathRewardOptions])
def test_a_missing_label_is_an_error_that_names_row_and_option(options):
    with pytest.raises(RewardError, match=r"^prompt row 3: there must be a label .* label_key"):
        make_scorer(options())([make_rollout("5", row=3)])
