"""For every policy loss, reduction and correction: two and three processes that share a step's sequences have, summed, the
loss and gradient of one process, also where one of them holds nothing to train on.
"""

import conformance_cases as suite
import pytest
from conformance_cases import CASES, UNTRAINABLE
from conformance_ranks import Ranks

# Groups are torn apart; the numbers of sequences and tokens differ.
SHARES = {
    "two": ((0, 3, 4, 9), (8, 2, 5, 6, 7, 1)),
    "three, one idle": ((9, 1, 3, 5), (8, 6, 4, 2, 0), (UNTRAINABLE,)),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    started = Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()


def check_ranks(ranks, name, shares):
    answers = ranks.step(name, shares)
    metrics, gradients = suite.whole(name)
    assert [is_idle for _, _, is_idle in answers] == [share == (UNTRAINABLE,) for share in shares]
    for loss, summed, _ in answers:
        suite.check_numbers({"loss": loss}, {"loss": metrics["loss"]})
        suite.check_gradients(summed, gradients)


@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("name", CASES)
def test_ranks_together_have_the_gradient_of_one_process(name, shares, ranks):
    check_ranks(ranks, name, shares)


def test_the_shares_are_the_whole_batch():
    for shares in SHARES.values():
        assert sorted(s for share in shares for s in share) == list(range(suite.made_batch().num_sequences))
    assert not suite.made_batch().select([UNTRAINABLE]).loss_mask.any()


def test_a_lost_denominator_between_ranks_is_seen(ranks):
    # a share counted twice or left out is a gradient of another size
    name = next(iter(CASES))
    with pytest.raises(AssertionError):
        check_ranks(ranks, name, ((0, 3, 4, 9), (8, 2, 5, 6, UNTRAINABLE)))
