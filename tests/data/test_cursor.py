"""The place in the data: what was consumed does not depend on where a run stopped."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.data.cursor import PromptCursor
from strop.types import DataError


def test_three_rows_in_order_eight_taken_saved_and_two_more():
    first = PromptCursor(3, seed=0, shuffle=False)
    assert first.take(8) == [0, 1, 2, 0, 1, 2, 0, 1]
    second = PromptCursor(3, seed=0, shuffle=False)
    second.load_state(json.loads(json.dumps(first.state())))
    assert second.take(2) == [2, 0]


@given(st.integers(1, 9), st.integers(0, 5), st.booleans(), st.lists(st.integers(0, 20), max_size=6), st.integers(0, 6))
def test_rows_consumed_with_a_stop_equal_those_of_an_uninterrupted_run(num_rows, seed, shuffle, sizes, stop):
    straight = PromptCursor(num_rows, seed=seed, shuffle=shuffle).take(sum(sizes))
    cursor, taken = PromptCursor(num_rows, seed=seed, shuffle=shuffle), []
    for number, size in enumerate(sizes):
        if number == stop:
            state, cursor = cursor.state(), PromptCursor(num_rows, seed=seed, shuffle=shuffle)
            cursor.load_state(state)
        taken += cursor.take(size)
    assert taken == straight


@given(st.integers(1, 50), st.integers(0, 2**40), st.booleans())
def test_every_epoch_has_each_row_once(num_rows, seed, shuffle):
    taken = PromptCursor(num_rows, seed=seed, shuffle=shuffle).take(3 * num_rows)
    for epoch in range(3):
        assert sorted(taken[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = []
    for seed in (0, 1):
        cursor = PromptCursor(20, seed=seed, shuffle=True)
        orders += [tuple(cursor.take(20)), tuple(cursor.take(20))]
    assert len({*orders, tuple(range(20))}) == 5


def test_all_orders_of_three_rows_occur_about_equally_often():
    counts = {}
    for seed in range(600):
        order = tuple(PromptCursor(3, seed=seed, shuffle=True).take(3))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert all(60 <= count <= 140 for count in counts.values())  # 100 expected, standard deviation 9.1


def test_the_order_of_a_seed_is_the_same_for_ever():
    # A run that is resumed under another numpy goes on in the same order; written down from a run of numpy 2.4.
    assert PromptCursor(6, seed=7, shuffle=True).take(12) == [4, 3, 2, 1, 0, 5, 1, 4, 3, 2, 5, 0]


@pytest.mark.parametrize("name, other", [("num_rows", 4), ("seed", 1), ("shuffle", True)])
def test_a_state_of_other_data_is_refused_with_both_values(name, other):
    mine = {"num_rows": 3, "seed": 0, "shuffle": False}
    theirs = mine | {name: other}
    cursor = PromptCursor(theirs.pop("num_rows"), **theirs)
    with pytest.raises(DataError, match=rf"{name} must be the same .*got {mine[name]} now and {other} then"):
        PromptCursor(3, seed=0, shuffle=False).load_state(cursor.state())


@pytest.mark.parametrize(
    "change", [{"position": 3}, {"position": -1}, {"position": 1.0}, {"epoch": None}, {"epoch": -1}, {"epoch": True}]
)
def test_a_damaged_state_is_refused_and_changes_nothing(change):
    cursor = PromptCursor(3, seed=0, shuffle=False)
    cursor.take(1)
    with pytest.raises(DataError, match=f"{next(iter(change))} must be a whole number"):
        cursor.load_state(cursor.state() | change)
    assert cursor.take(1) == [1]


def test_no_rows_and_a_negative_number_are_errors():
    with pytest.raises(DataError, match="at least one row, got 0"):
        PromptCursor(0, seed=0, shuffle=False)
    with pytest.raises(ValueError, match="n must be 0 or more, got -1"):
        PromptCursor(3, seed=0, shuffle=False).take(-1)
