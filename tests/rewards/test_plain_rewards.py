"""Exact text, numbers, and the scores that reasoning-gym gives."""

import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from written_rollouts import make_rollout

from strop.config.data import ReasoningGymOptions
from strop.config.sampling import DatasetRewardOptions, ExactRewardOptions, NumberRewardOptions
from strop.data.sources import load_prompts
from strop.rewards import make_scorer
from strop.rewards.number import last_number
from strop.types import RewardError, Rollout


@pytest.fixture
def score():
    def run(options, text, label, **rollout):
        return make_scorer(options)([make_rollout(text, label, **rollout)]).rollouts[0].reward

    return run


@pytest.mark.parametrize(
    "text, label, strip, reward",
    [
        ("5", "5", True, 1.0),
        (" 5\n", "5 ", True, 1.0),
        (" 5", "5", False, 0.0),
        ("5", 5, True, 1.0),
        ("Yes", "yes", True, 0.0),
        ("It is 5", "5", True, 0.0),
        ("", "", True, 1.0),
    ],
)
def test_exact_is_equality_letter_for_letter(score, text, label, strip, reward):
    assert score(ExactRewardOptions(strip=strip), text, label) == reward


@pytest.mark.parametrize("finish_reason", ["length", "abort"])
def test_exact_gives_nothing_for_a_response_that_did_not_end_by_itself(score, finish_reason):
    assert score(ExactRewardOptions(), "5", "5", finish_reason=finish_reason) == 0.0


@pytest.mark.parametrize(
    "text, expected",
    [
        ("$1,234.00", "1234.00"),
        ("\u22123", "-3"),
        ("x = -3", "-3"),
        ("(2,-5)", "-5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("$5-$3", "3"),
        ("7-3", "3"),
        ("x-3", "3"),
        ("\\boxed{-3}", "-3"),
        ("3 or 4?", "4"),
        ("It is 12.", "12"),
        ("50%", "50"),
        ("-.5", "-0.5"),
        ("0.50", "0.5"),
        ("1.5e3 m", "1500"),
        ("1,2,3", "3"),
        ("12,345,678", "12345678"),
        ("1,2345", "2345"),
        ("1e9999", "9999"),
        ("9" * 30, "9" * 30),
    ],
)
def test_the_last_number_of_a_text(text, expected):
    assert last_number(text) == Decimal(expected)


@pytest.mark.parametrize("text", ["", "none", "-", "$", ".", "one two", "1\u0662"[1:]])
def test_a_text_without_a_number_has_none(text):
    assert last_number(text) is None


@given(st.text("0123456789.,-+$%eE \u2212", max_size=40))
def test_no_text_of_number_letters_breaks_the_search(text):
    assert isinstance(last_number(text), Decimal | None)


@given(st.integers(), st.booleans())
def test_any_integer_is_found_as_it_was_written(number, has_commas):
    text = f"{number:,}" if has_commas else str(number)
    assert last_number(f"so 7 of {text}.") == number


@pytest.mark.parametrize(
    "text, label, tolerance, reward",
    [
        ("3 and then 4", 4, 0, 1.0),
        ("3 and then 4", 3, 0, 0.0),
        ("nothing", 0, 0, 0.0),
        ("0.1", 0.1, 0, 1.0),
        ("0.35", "0.3", 0.05, 1.0),  # exactly at the tolerance, which binary fractions would miss
        ("0.351", "0.3", 0.05, 0.0),
        ("1234", "$1,234.00", 0, 1.0),
        ("-3", "\u22123", 0, 1.0),
        ("9007199254740993", "9007199254740992", 0, 0.0),  # the same float64
        ("1" * 1_000_000, 1, 0.5, 0.0),
        # a difference of 10^6 digits, which is more than a Decimal holds
        ("9" * 1_000_000, 7, 0.0, 0.0),
        ("-" + "9" * 1_000_000, 7, 1e300, 0.0),
        ("7", "9" * 1_000_000, 0.5, 0.0),
        ("9" * 1_000_000 + "e999", "9" * 1_000_000 + "e-999", 0.5, 0.0),
        ("9" * 1_000_000, "9" * 1_000_000, 0.0, 1.0),
        ("9" * 999_999 + "8", "9" * 1_000_000, 0.5, 0.0),
        ("9" * 999_999 + "8", "9" * 1_000_000, 1.0, 1.0),
        ("0" * 1_000_000 + "7", 7, 0.0, 1.0),
    ],
)
def test_a_number_is_right_within_the_tolerance(score, text, label, tolerance, reward):
    assert score(NumberRewardOptions(tolerance=tolerance), text, label) == reward


@pytest.mark.parametrize("options", [ExactRewardOptions(), NumberRewardOptions(tolerance=0.5)])
@pytest.mark.parametrize("part", ["9", "-", "$", ".", "1.", "1,", ",111", "1e", "12 ", "-,", "\u2212", " ", "0"])
def test_a_million_characters_have_a_score_within_a_second(score, options, part):
    """Of this process's own time, on a machine that is ten times slower; a search that goes back takes hours."""
    started = time.process_time()
    assert score(options, part * (1_000_000 // len(part)), "70") == 0.0
    assert time.process_time() - started < 10.0


@pytest.mark.parametrize("label", ["five", "", "3 apples"])
def test_a_label_that_is_not_a_number_is_an_error(score, label):
    with pytest.raises(
        RewardError, match=r"^prompt row 2: the label must be a number for reward\.kind = number, got '"
    ):
        score(NumberRewardOptions(), "5", label, row=2)


@pytest.mark.parametrize("options", [ExactRewardOptions(), NumberRewardOptions()])
@pytest.mark.parametrize("label", [True, [5], {"a": 5}, float("nan"), float("inf"), Decimal("NaN")])
def test_a_label_that_is_neither_text_nor_a_finite_number_is_an_error(score, options, label):
    with pytest.raises(RewardError, match=r"^prompt row 2: the label must be text or a finite number for reward\.kind"):
        score(options, "5", label, row=2)


class _Letters:
    """As much of a tokenizer as a prompt without a template needs."""

    chat_template = None
    eos_token_id = None

    def encode(self, text, add_special_tokens=True):
        return [ord(letter) for letter in text]


def answered(prompt, text):
    n = len(prompt.tokens)
    logprobs, versions = (0.0,) * n + (-0.5,), (-1,) * n + (0,)
    return Rollout(prompt, 0, 0, (*prompt.tokens, 9), (False,) * n + (True,), logprobs, versions, "stop", text)


def test_dataset_gives_the_score_of_the_datasets_own_scorer():
    options = ReasoningGymOptions(name="gcd", size=3)  # its scorer gives 0.33 for an answer with white space around
    scorer = make_scorer(DatasetRewardOptions())
    for prompt in load_prompts(options, _Letters()).prompts:
        right, wrong = scorer([answered(prompt, f" {prompt.label}\n"), answered(prompt, "none")]).rollouts
        assert (right.reward, wrong.reward) == (1.0, 0.0)


def test_a_datasets_scorer_has_the_settings_its_tasks_were_made_with():
    # decimal_arithmetic compares at the precision it was told: 0.001 more is right with 2 places and wrong with 6.
    rewards = {}
    for places in (2, 6):
        settings = {"min_num_decimal_places": places, "max_num_decimal_places": places}
        options = ReasoningGymOptions(name="decimal_arithmetic", size=1, options=settings)
        prompt = load_prompts(options, _Letters()).prompts[0]
        text = str(Decimal(prompt.label) + Decimal("0.001"))
        rewards[places] = make_scorer(DatasetRewardOptions())([answered(prompt, text)]).rollouts[0].reward
    assert rewards[2] == 1.0
    assert rewards[6] < 1.0


def test_dataset_refuses_prompts_that_reasoning_gym_did_not_make(score):
    with pytest.raises(RewardError, match=r"^reward\.kind must not be dataset for prompts .* row 2"):
        score(DatasetRewardOptions(on_error="zero"), "5", "5", row=2)
