"""How sequences are laid out for one forward pass, and how a step is cut: by hand, and for any lengths."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_batches import make_batch

from strop.trainers import cut, lay_out

seeded = settings(derandomize=True, deadline=None, max_examples=100)
BATCH = make_batch(([5, 6], [7]), ([8], [9]), ([1, 2], [3, 4]))  # 3, 2 and 4 tokens


@pytest.mark.parametrize(
    "kind, ids, positions, mask",
    [
        (
            "padded",
            [[5, 6, 7, 0], [8, 9, 0, 0], [1, 2, 3, 4]],
            [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]],
            None,
        ),
        (
            "left_padded",
            [[0, 5, 6, 7], [0, 0, 8, 9], [1, 2, 3, 4]],
            [[0, 0, 1, 2], [0, 0, 0, 1], [0, 1, 2, 3]],
            [[False, True, True, True], [False, False, True, True], [True, True, True, True]],
        ),
        (
            "packed",
            [[5, 6, 7, 8, 9, 1, 2, 3, 4]],
            [[0, 1, 2, 0, 1, 0, 1, 2, 3]],
            None,
        ),
    ],
)
def test_layouts_by_hand(kind, ids, positions, mask):
    laid = lay_out(BATCH, kind)
    assert laid.input_ids.tolist() == ids
    assert laid.position_ids.tolist() == positions
    assert (laid.attention_mask.tolist() if laid.attention_mask is not None else None) == mask


@pytest.mark.parametrize("kind", ["padded", "left_padded", "packed"])
def test_places_find_every_token_again(kind):
    laid = lay_out(BATCH, kind)
    assert laid.input_ids.flatten()[laid.places].tolist() == [5, 6, 7, 8, 9, 1, 2, 3, 4]
    assert laid.position_ids.flatten()[laid.places].tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]


def positions_of(part, lengths):
    """Positions of one padded forward pass."""
    sizes = [lengths[s] for s in part]
    return len(sizes) * max(sizes)


@seeded
@given(st.lists(st.integers(1, 200), max_size=20), st.integers(1, 500))
def test_a_padded_cut_takes_every_sequence_once_within_the_budget_with_less_padding_than_a_pass(lengths, budget):
    parts = cut(lengths, max_tokens=budget)
    assert sorted(s for part in parts for s in part) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or positions_of(part, lengths) <= budget
        assert positions_of(part, lengths) - sum(lengths[s] for s in part) <= 40


def test_a_cut_by_hand():
    # padded, 12 positions: 6 + (6 for a 5) = 12; then 4 4 2 would be 3 x 4 = 12
    lengths = [4, 6, 2, 5, 4]
    assert cut(lengths, max_tokens=12) == [[1, 3], [0, 4, 2]]
    # 11 positions hold one row of 6 and no second; two of 5 and 4 (2 x 5); 4 and 2 (2 x 4)
    assert cut(lengths, max_tokens=11) == [[1], [3, 0], [4, 2]]


def test_a_sequence_longer_than_the_budget_goes_alone():
    assert cut([9, 2, 2], max_tokens=4) == [[0], [1, 2]]
