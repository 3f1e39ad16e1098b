"""Scorers that reward tokens or turns, alone and among named rewards: where each number lands, and what is refused."""

import pytest

from strop.config.sampling import FunctionRewardOptions, SlimeRewardOptions
from strop.rewards import make_scorer
from strop.rewards.places import with_rest
from strop.types import Prompt, RewardError, Rollout

#  prompt     turn 0     tool    turn 1
#  5    6     9    2     7       3    4    1
MASK = (False, False, True, True, False, True, True, True)


def rollout_of(mask=MASK, *, sample=0):
    return Rollout(
        Prompt(3, (5, 6), "q"),
        group_id=3,
        sample=sample,
        tokens=(5, 6, 9, 2, 7, 3, 4, 1)[: len(mask)],
        response_mask=mask,
        rollout_logprobs=(0.0,) * len(mask),
        policy_versions=(0,) * len(mask),
        finish_reason="stop",
        text="x",
    )


@pytest.fixture
def score(tmp_path):
    """Scores one rollout, or those given, with a function of this body."""

    def run(returned, *rollouts, kind=FunctionRewardOptions, **options):
        path = tmp_path / "score.py"
        arguments = "args, given" if kind is SlimeRewardOptions else "given"
        path.write_text(
            f"from strop.types import TokenRewards, TurnRewards\ndef score({arguments}):\n    return {returned}\n"
        )
        scorer = make_scorer(kind(function=f"{path}:score", **options))
        scored = scorer(rollouts or [rollout_of()])
        return scored.rollouts[0] if len(scored.rollouts) == 1 else scored

    return run


BY_TOKEN = (None, None, 1.0, 0.0, None, 0.5, 0.0, -2.0)
BY_TURN = (None, None, None, 0.25, None, None, None, 1.0)


@pytest.mark.parametrize(
    "returned, per",
    [
        ("TokenRewards([1, 0, 0.5, 0, -2])", "response"),
        ("[1, 0, 0.5, 0, -2]", "token"),
        ("(1, 0, 0.5, 0, -2)", "token"),
        ("__import__('numpy').array([1, 0, 0.5, 0, -2])", "token"),
        ("__import__('torch').tensor([1, 0, 0.5, 0, -2], requires_grad=True)", "token"),
        ("TokenRewards([1, 0, 0.5, 0, -2])", "turn"),  # the type says it
    ],
)
@pytest.mark.parametrize("kind", [FunctionRewardOptions, SlimeRewardOptions], ids=["function", "slime"])
def test_a_number_per_token_lands_on_the_tokens_that_the_policy_wrote(score, kind, returned, per):
    found = score(returned, kind=kind, per=per)
    assert found.token_rewards == BY_TOKEN
    assert found.reward == -0.5  # 1 + 0 + .5 + 0 - 2


@pytest.mark.parametrize("returned, per", [("TurnRewards([0.25, 1])", "response"), ("[0.25, 1]", "turn")])
@pytest.mark.parametrize("kind", [FunctionRewardOptions, SlimeRewardOptions], ids=["function", "slime"])
def test_a_number_per_turn_lands_on_the_turns_last_token(score, kind, returned, per):
    found = score(returned, kind=kind, per=per)
    assert (found.token_rewards, found.reward) == (BY_TURN, 1.25)


def test_a_batched_function_returns_a_list_of_them(score):
    # the second rollout has one turn of two tokens
    scored = score(
        "[[1, 0, 0.5, 0, -2], [3, 4]]", rollout_of(), rollout_of(MASK[:4], sample=1), batched=True, per="token"
    )
    assert [r.token_rewards for r in scored.rollouts] == [BY_TOKEN, (None, None, 3.0, 4.0)]


def test_none_gives_a_token_no_reward_which_is_not_0(score):
    found = score("TokenRewards([None, 0, None, None, 1])")
    assert found.token_rewards == (None, None, None, 0.0, None, None, None, 1.0)
    assert found.reward == 1.0


@pytest.mark.parametrize("returned", ["TokenRewards([None] * 5)", "TurnRewards([None, None])", "None"])
def test_no_number_at_all_is_no_score(score, returned):
    found = score(returned)
    assert (found.reward, found.token_rewards, found.excluded) == (None, None, "no_score")


def test_an_empty_response_has_nothing_to_reward_and_no_score(score):
    # case 13
    found = score("TokenRewards([])", rollout_of(MASK[:2]))
    assert (found.reward, found.excluded) == (None, "no_score")


@pytest.mark.parametrize(
    "returned, says",
    [
        ("TokenRewards([1] * 4)", "one number for each token that the policy wrote, got 4 for 5"),
        ("TokenRewards([1] * 6)", "got 6 for 5. Tokens of the prompt, or that a tool wrote, are given none"),
        ("TokenRewards([1] * 8)", "got 8 for 5. Tokens of the prompt, or that a tool wrote, are given none"),
        ("TurnRewards([1] * 3)", "one number for each turn of the policy, got 3 for 2"),
        ("TurnRewards([])", "got 0 for 2"),
        ("{'a': 1.0, 'b': TurnRewards([1])}", "one number for each turn of the policy, got 1 for 2"),
    ],
)
@pytest.mark.parametrize("on_error", ["fail", "zero", "exclude"])
def test_a_wrong_number_of_them_is_an_error_with_both_counts_whatever_the_policy(score, returned, says, on_error):
    with pytest.raises(RewardError, match=r"score\.py:score must return") as caught:
        score(returned, on_error=on_error)
    assert says in str(caught.value)
    assert "(prompt row 3, sample 0)" in str(caught.value)


@pytest.mark.parametrize(
    "returned, per, says",
    [
        ("[1, 2, 3, 4, 5]", "response", "must return a number, or None for no score, got [1, 2, 3, 4, 5] of type list"),
        ("1.0", "token", "must return one number for each token (reward.per = token), got 1.0 of type float"),
        ("1.0", "turn", "must return one number for each turn (reward.per = turn), got 1.0"),
        ("'abcde'", "token", "must return one number for each token"),
        ("TokenRewards(5)", "response", "must return one number for each token, got 5 of type int"),
        (
            "TokenRewards({1: .1, 2: .2, 3: .3, 4: .4, 5: .5})",
            "response",
            "must return one number for each token, got {1",
        ),
        ("TurnRewards({3, 4})", "response", "must return one number for each turn, got {3, 4} of type set"),
        ("TokenRewards([1, 2, 'x', 4, 5])", "response", "must return a number, or None for no score, at token 2"),
        ("[[1], [2]]", "turn", "must return a number, or None for no score, at turn 0, got [1]"),
    ],
)
@pytest.mark.parametrize("on_error", ["fail", "zero"])
def test_what_is_no_list_of_numbers_is_an_error_whatever_the_policy(score, returned, per, says, on_error):
    with pytest.raises(RewardError) as caught:
        score(returned, per=per, on_error=on_error)
    assert says in str(caught.value)
    assert "prompt row 3" in str(caught.value)


def test_a_list_that_nobody_asked_for_says_how_to_ask(score):
    with pytest.raises(RewardError, match=r"Set reward.batched = true .* or reward.per if it rewards tokens or turns"):
        score("[1, 2, 3, 4, 5]")


@pytest.mark.parametrize("bad", ["float('nan')", "float('inf')", "10**400"])
@pytest.mark.parametrize("form", ["TokenRewards([1, 0, {}, 0, 1])", "{{'a': 1.0, 'b': TurnRewards([0, {}])}}"])
def test_a_number_that_is_not_finite_is_by_policy(score, form, bad):
    returned = form.format(bad)
    with pytest.raises(RewardError, match=r"must return a finite number.*returned (nan|inf).* at (token 2|turn 1)"):
        score(returned)
    zero = score(returned, on_error="zero")
    assert (zero.reward, zero.token_rewards, zero.excluded) == (0.0, None, None)
    left_out = score(returned, on_error="exclude")
    assert (left_out.reward, left_out.token_rewards, left_out.excluded) == (None, None, "nan_score")


def test_numbers_whose_sum_is_not_finite_are_no_score(score):
    assert score("TokenRewards([1e308] * 5)", on_error="exclude").excluded == "nan_score"


# ---- among named rewards ---------------------------------------------------------------------------------------------


def test_named_rewards_may_be_per_turn_and_a_number_lands_on_the_last_token(score):
    # steps .25 | 1; correct 2 at the end: 3 there
    found = score("{'correct': 2.0, 'steps': TurnRewards([0.25, 1])}")
    assert found.token_rewards == (None, None, None, 0.25, None, None, None, 3.0)
    assert found.reward == 3.25
    assert found.reward_parts == {"correct": 2.0, "steps": 1.25}


def test_a_list_among_named_rewards_is_per_what_the_option_says(score):
    found = score("{'correct': 2.0, 'steps': [0.25, 1]}", per="turn")
    assert found.token_rewards == (None, None, None, 0.25, None, None, None, 3.0)


def test_an_outcome_of_0_is_a_reward_of_the_last_token_too(score):
    found = score("{'correct': 0.0, 'steps': TurnRewards([0.25, None])}")
    assert found.token_rewards == (None, None, None, 0.25, None, None, None, 0.0)


def test_weights_count_in_the_sum_and_on_the_tokens_and_not_in_the_names(score):
    # .5 x 2 + 4 x (.25 + 1): 1 at the end, 1 | 4 on the turns
    weights = {"correct": 0.5, "steps": 4.0}
    found = score("{'correct': 2.0, 'steps': TurnRewards([0.25, 1])}", weights=weights)
    assert found.reward == 6.0
    assert found.token_rewards == (None, None, None, 1.0, None, None, None, 5.0)
    assert found.reward_parts == {"correct": 2.0, "steps": 1.25}


def test_named_numbers_are_weighed(score):
    # 1 x 1 + .2 x .5
    found = score("{'correct': 1.0, 'format': 0.5}", weights={"correct": 1, "format": 0.2})
    assert found.reward == pytest.approx(1.1, abs=1e-12)
    assert found.reward_parts == {"correct": 1.0, "format": 0.5}
    assert found.token_rewards is None


@pytest.mark.parametrize(
    "returned, got",
    [("{'correct': 1.0}", "correct"), ("{'correct': 1.0, 'format': 1.0, 'style': 1.0}", "correct, format, style")],
)
@pytest.mark.parametrize("on_error", ["fail", "exclude"])
def test_names_other_than_those_of_the_weights_are_refused_with_both_lists(score, returned, got, on_error):
    with pytest.raises(RewardError) as caught:
        score(returned, weights={"format": 0.2, "correct": 1.0}, on_error=on_error)
    assert f"must return the named rewards of reward.weights, correct, format, got {got} for" in str(caught.value)


def test_a_plain_number_where_weights_want_names_is_refused(score):
    with pytest.raises(RewardError, match=r"named rewards as a dict, those of reward.weights: a, b, got 1.0 of type"):
        score("1.0", weights={"a": 1.0, "b": 2.0})


# ---- what each token earns -------------------------------------------------------------------------------------------


def test_what_no_token_was_given_is_earned_by_the_last(score):
    from dataclasses import replace

    plain = replace(rollout_of(), reward=2.0)
    assert with_rest(plain) == (None, None, None, None, None, None, None, 2.0)
    assert with_rest(replace(plain, reward=0.0))[-1] == 0.0
    by_turn = score("TurnRewards([0.25, None])")
    assert with_rest(by_turn) == (None, None, None, 0.25, None, None, None, None)
    # a penalty for length that was taken from the reward afterwards
    assert with_rest(replace(by_turn, reward=-0.75)) == (None, None, None, 0.25, None, None, None, -1.0)
    assert with_rest(replace(rollout_of(MASK[:2]), reward=3.0)) == (None, None)
