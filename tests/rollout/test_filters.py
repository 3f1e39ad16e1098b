"""Filters keep and drop what they say, count it under its reason, and fail with the prompt's row in the message."""

import dataclasses

import numpy as np
import pytest
import torch

from strop.config.filtering import FilterOptions
from strop.rollout.filters import Filters, filter_source
from strop.types import FilterError, Group, Prompt, RewardError, Rollout


def group(row, rewards, parts=None):
    """A group of row's rollouts with these rewards; `parts` are named rewards in their place."""
    prompt = Prompt(row=row, tokens=(5,), text="p", label="7", metadata={"a": 1})
    rollouts = [
        Rollout(
            prompt,
            row,
            i,
            (5, 9, 9),
            (False, True, True),
            (0.0, -0.5, -0.1),
            (-1, 0, 0),
            "stop",
            text=f"t{i}",
            reward=r,
        )
        for i, r in enumerate(rewards)
    ]
    if parts:
        rollouts = [dataclasses.replace(r, reward_parts=p) for r, p in zip(rollouts, parts, strict=True)]
    return Group(row, prompt, tuple(rollouts))


@pytest.fixture
def filters(tmp_path):
    """Filters from options and the source of their functions; without one nothing is loaded."""

    def make(source="", *, looks_at_parts=False, **options):
        file = tmp_path / "mine.py"
        file.write_text(source)
        named = {n: f"{file}:{options[n]}" for n in ("group", "rollout") if n in options}
        return Filters(FilterOptions(**{**options, **named}), looks_at_parts=looks_at_parts)

    return make


def kept(filtered):
    return [g.prompt.row for g in filtered.groups]


def test_groups_whose_rewards_are_all_equal_are_dropped_and_counted():
    """Case 8's values: equal in float64, whatever their rounding in a mean."""
    given = [group(0, [0.35] * 8), group(1, [1.0, 0.0]), group(2, [0.1] * 7), group(3, [0.0, 1e-9])]
    found = Filters(FilterOptions(equal_rewards=True))(given)
    assert kept(found) == [1, 3]
    assert found.dropped == {"equal_rewards": 2}


def test_without_filters_everything_stays_groups_without_a_reward_too():
    given = [group(0, [1.0, 1.0]), group(1, [None, None])]
    found = Filters(FilterOptions())(given)
    assert found.groups == given
    assert not found.dropped


def test_one_scored_rollout_equals_itself_and_none_is_a_reason_of_its_own():
    found = Filters(FilterOptions(equal_rewards=True))([group(0, [1.0, None]), group(1, [None, None])])
    assert found.groups == []
    assert found.dropped == {"equal_rewards": 1, "no_reward": 1}


def test_with_rewards_kept_apart_equal_sums_of_different_parts_are_not_equal():
    parts = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}]
    given = [group(0, [1.0, 1.0], parts), group(1, [1.0, 1.0], parts[:1] * 2)]
    options = FilterOptions(equal_rewards=True)
    assert kept(Filters(options, looks_at_parts=True)(given)) == [0]
    assert kept(Filters(options)(given)) == []


def test_a_group_filter_of_yours_sees_the_group_with_its_scored_rollouts(filters):
    source = """
def keep(group):
    assert all(r.reward is not None for r in group.rollouts)
    return group.prompt.row > 0 and sum(r.reward for r in group.rollouts) > 1
"""
    given = [group(0, [1.0, 1.0]), group(1, [1.0, None, 1.0]), group(2, [1.0, 0.0])]
    found = filters(source, group="keep")(given)
    assert kept(found) == [1]
    assert found.dropped == {"group_filter": 2}
    assert len(found.groups[0].rollouts) == 3  # what has no reward stays in the records


def test_a_dropped_rollout_has_no_reward_and_says_why(filters):
    found = filters("def keep(r):\n    return r.sample != 1\n", rollout="keep")([group(0, [1.0, 0.5, 0.0])])
    assert [r.reward for r in found.groups[0].rollouts] == [1.0, None, 0.0]
    assert [r.excluded for r in found.groups[0].rollouts] == [None, "rollout_filter", None]
    assert found.dropped == {"rollout_filter": 1}


def test_rollouts_are_dropped_before_rewards_are_compared_and_that_before_the_group_filter(filters):
    """[1, 1, 0] without its last one is equal. The group filter would drop both and is asked about the second alone."""
    source = "asked = []\ndef last(r):\n    return r.sample < 2\ndef no(g):\n    asked.append(g)\n    return False\n"
    found = filters(source, rollout="last", group="no", equal_rewards=True)(
        [group(0, [1.0, 1.0, 0.0]), group(1, [1.0, 0.0])]
    )
    assert found.dropped == {"rollout_filter": 1, "equal_rewards": 1, "group_filter": 1}


def test_a_rollout_that_has_no_reward_is_not_asked_about(filters):
    found = filters("def keep(r):\n    return r.reward > 0\n", rollout="keep")([group(0, [1.0, None])])
    assert not found.dropped


@pytest.mark.parametrize("value", [True, np.bool_(True), torch.tensor(1.0).std(unbiased=False) < 1])
def test_true_may_be_python_s_numpy_s_or_torch_s(value, filters, monkeypatch):
    made = filters("def keep(g):\n    return None\n", group="keep")
    monkeypatch.setattr(made, "_keeps_group", lambda group: value)
    assert kept(made([group(4, [1.0])])) == [4]


@pytest.mark.parametrize("value, kind", [("None", "NoneType"), ("1", "int"), ("'yes'", "str"), ("[True]", "list")])
def test_anything_but_true_or_false_is_refused_with_its_type_and_row(value, kind, filters):
    made = filters(f"def keep(g):\n    return {value}\n", group="keep")
    with pytest.raises(
        FilterError,
        match=rf"filter.group = .*:keep' must return true or false, got .* of type {kind} for prompt row 7\.",
    ):
        made([group(7, [1.0])])


def test_a_filter_that_raises_is_named_with_the_row_and_the_sample(filters):
    made = filters("def keep(r):\n    return r.prompt.metadata['b'] > 0\n", rollout="keep")
    with pytest.raises(
        FilterError, match=r"filter.rollout = .* raised KeyError: 'b' for prompt row 3, sample 0\. Mend it\."
    ):
        made([group(3, [1.0])])


def test_a_function_that_is_not_there_is_refused_under_the_filter_s_name(filters):
    with pytest.raises(RewardError, match=r"filter.rollout must name a function that exists"):
        filters("", rollout="keep")


def test_every_reason_that_there_can_be_is_a_metric_even_at_0():
    made = Filters(FilterOptions(equal_rewards=True))
    found = made([group(0, [1.0, 0.0])])
    assert {n: m.value for n, m in made.metrics(found.dropped).items()} == {
        "dropped/no_reward": 0,
        "dropped/equal_rewards": 0,
    }


SLIME = """
import torch
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample

def check_reward_nonzero_std(args, samples: list[Sample], **kwargs):
    rewards = [sample.get_reward_value(args) for sample in samples]
    keep = torch.tensor(rewards, dtype=torch.float64).std() > args.least
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{round(rewards[0], 1)}")

def plain(args, samples):
    return samples[0].status == Sample.Status.COMPLETED and samples[0].response == "t0"
"""


def test_slime_s_own_kind_of_filter_runs_unchanged_and_its_reason_is_a_metric(filters):
    made = filters(SLIME, group="check_reward_nonzero_std", group_kind="slime", group_args={"least": 1e-6})
    found = made([group(0, [1.0, 1.0]), group(1, [1.0, 0.0]), group(2, [0.0, 0.0])])
    assert kept(found) == [1]
    assert {n: m.value for n, m in made.metrics(found.dropped).items()} == {
        "dropped/no_reward": 0,
        "dropped/group_filter": 2,
        "dropped/group_filter/zero_std_1.0": 1,
        "dropped/group_filter/zero_std_0.0": 1,
    }


def test_a_filter_of_slime_s_may_return_a_plain_bool(filters):
    assert kept(filters(SLIME, group="plain", group_kind="slime")([group(0, [1.0])])) == [0]


def test_an_attribute_that_args_lacks_is_named_with_the_table_it_belongs_to(filters):
    made = filters(SLIME, group="check_reward_nonzero_std", group_kind="slime")
    with pytest.raises(
        FilterError, match=r"args.least is not there. Set it in the table \[filter.group_args\], which has reward_key"
    ):
        made([group(0, [1.0, 0.0])])


def test_the_fingerprint_of_filters_follows_their_files(tmp_path):
    file = tmp_path / "f.py"
    file.write_text("a")
    options = FilterOptions(rollout=f"{file}:keep")
    before = filter_source(options)
    file.write_text("b")
    assert filter_source(options) != before
