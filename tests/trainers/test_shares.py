"""How the sequences of a step are shared among processes."""

from dataclasses import replace

import pytest
from made_batches import make_batch
from torch import tensor

from strop.trainers.cutting import Costs, shares


def batch_of(*lengths):
    """Sequences of these lengths, each of its own prompt of one token."""
    return make_batch(*(([i % 7], [1] * (length - 1)) for i, length in enumerate(lengths)))


def loads(batch, by_rank):
    return [sum(batch.lengths[s] for s in share) for share in by_rank]


@pytest.mark.parametrize("by_prompt", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_every_sequence_is_in_one_share(num_ranks, by_prompt):
    batch = batch_of(9, 3, 3, 5, 2, 8)
    found = shares(batch, num_ranks, Costs(), by_prompt=by_prompt)
    assert sorted(s for share in found for s in share) == list(range(6))
    assert all(share == sorted(share) for share in found)
    assert len(found) == num_ranks


def test_the_costliest_goes_to_the_rank_that_has_least():
    # 9 | 8 | then 5 to the 8 and 3 to the 9; 12 and 13, then 3 to the 12 and 2 to the 13: 15 and 15
    batch = batch_of(9, 3, 3, 5, 2, 8)
    assert loads(batch, shares(batch, 2, Costs(), by_prompt=False)) == [15, 15]


def test_attention_makes_a_long_sequence_cost_more_than_its_length():
    # 20 and 4 x 5 are alike in positions; in pairs 210 against 60: the long one is worth all five others
    batch = batch_of(20, 5, 5, 5, 5, 5)
    assert shares(batch, 2, Costs(position=1.0, pair=0.0), by_prompt=False) == [[0, 5], [1, 2, 3, 4]]
    assert shares(batch, 2, Costs(position=1.0, pair=1.0), by_prompt=False) == [[0], [1, 2, 3, 4, 5]]


def test_sequences_of_a_prompt_stay_together_up_to_a_quarter_of_a_share():
    # 4 groups of 4; a share is 8 sequences of 4 + 2 tokens, a quarter of it 12: a prompt with four responses
    rows = [([group, 0, 0, 0], [1, sample]) for group in range(4) for sample in range(4)]
    batch = replace(make_batch(*rows), group_ids=tensor([i // 4 for i in range(16) for _ in range(6)]))
    found = shares(batch, 2, Costs(), by_prompt=True)
    assert [sorted({s // 4 for s in share}) for share in found] == [[0, 2], [1, 3]]
    assert all(len(share) == 8 for share in found)


def test_there_may_be_more_ranks_than_sequences():
    assert shares(batch_of(3), 3, Costs(), by_prompt=False) == [[0], [], []]
