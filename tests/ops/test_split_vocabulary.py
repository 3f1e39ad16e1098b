"""Log-probabilities of a head whose rows lie in several processes, against the same head in one: float64, 1e-10."""

import pytest
import rank_processes
import torch
from ops.split_heads import SplitHead, outcome

HIDDEN, VOCAB = 5, 23
CLOSE = {"rtol": 1e-10, "atol": 1e-10}  # float64: sums over columns in another order
SIZES = {2: [(12, 11), (1, 22), (23, 0)], 3: [(8, 8, 7), (2, 20, 1), (11, 0, 12)]}


@pytest.fixture(scope="module")
def ranks():
    with rank_processes.opened(3) as found:
        yield found.make(SplitHead, torch.nn.Linear(1, 1))


@pytest.fixture(params=[2, 3], ids=["two", "three"])
def sizes(request):
    """Of three ways to divide the rows."""
    return SIZES[request.param]


def inputs(num_tokens, *, spread=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64) * spread
    bias = torch.randn(VOCAB, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCAB, (num_tokens,), generator=generator)
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), targets


def check(ranks, sizes, hidden, weight, bias, targets, *, tolerance=CLOSE, **more):
    wanted = outcome(hidden, weight, bias, targets, **more)
    for rows in sizes:
        found = ranks.outcomes(hidden, weight, bias, targets, sizes=rows, **more)
        for whole in found:  # every rank has all of these
            for mine, theirs in zip(whole[:3], wanted[:3], strict=True):
                torch.testing.assert_close(mine, theirs, **tolerance)
        for at in (3, 4):  # and its own rows of these
            if wanted[at] is not None:
                torch.testing.assert_close(torch.cat([part[at] for part in found]), wanted[at], **tolerance)


# 1024 rows are held at once: none, one, a chunk and one more, two chunks and a rest
@pytest.mark.parametrize("num_tokens", [0, 1, 1025, 2100])
def test_values_and_gradients_are_those_of_one_process(ranks, sizes, num_tokens):
    hidden, weight, bias, targets = inputs(num_tokens)
    check(ranks, sizes, hidden, weight, bias, targets, with_entropy=True, temperature=0.6)
    check(ranks, sizes, hidden, weight, None, targets)


def test_extreme_logits(ranks, sizes):
    """Of the order of 1e4: one token has all probability, and a sum of exponentials that is not shifted overflows."""
    check(ranks, sizes, *inputs(40, spread=1e4), with_entropy=True)
    hidden, weight, _, targets = inputs(40)
    check(ranks, sizes, hidden, torch.zeros_like(weight), None, targets, with_entropy=True)  # all tokens alike


def test_extreme_logits_in_float32_are_as_exact_as_those_of_one_process(ranks, sizes):
    """Differences first: logsumexp of 1e4 has steps of .001."""
    hidden, weight, _, targets = inputs(40, dtype=torch.float32)
    bias = torch.full((VOCAB,), -1e4)
    check(ranks, sizes, hidden, weight, bias, targets, with_entropy=True, tolerance={"rtol": 1e-5, "atol": 1e-5})


def test_a_token_that_is_not_finite_leaves_the_others_alone(ranks, sizes):
    hidden, weight, bias, targets = inputs(9)
    rows = sizes[0]
    wanted = ranks.outcomes(hidden, weight, bias, targets, sizes=rows, with_entropy=True)[0]
    hidden[4], hidden[7] = torch.nan, torch.inf
    finite = torch.tensor([i not in (4, 7) for i in range(9)])
    for found in ranks.outcomes(hidden, weight, bias, targets, sizes=rows, with_entropy=True):
        for mine, theirs in zip(found[:3], wanted[:3], strict=True):
            torch.testing.assert_close(mine[finite], theirs[finite], **CLOSE)
            assert not mine[~finite].isfinite().any()
    # selected out before, as a masked slot is, it is in nothing
    found = ranks.outcomes(hidden[finite], weight, bias, targets[finite], sizes=rows, with_entropy=True)
    assert all(tensor.isfinite().all() for part in found for tensor in part)


def test_gradients_are_those_of_finite_differences(ranks, sizes):
    hidden, weight, bias, targets = inputs(4)
    step = 1e-6
    more = {"with_entropy": True, "temperature": 0.8, "sizes": sizes[1]}

    def value(hidden, weight):
        logprobs, entropy, *_ = ranks.outcomes(hidden, weight, bias, targets, **more)[-1]
        places = torch.arange(1, 5, dtype=torch.float64).sin()
        return float((places * logprobs).sum() + (places.flip(0) * entropy).sum())

    parts = ranks.outcomes(hidden, weight, bias, targets, **more)
    gradients = parts[0][2], torch.cat([part[3] for part in parts])
    for which, place in ((0, (1, 2)), (0, (3, 0)), (1, (0, 1)), (1, (22, 4)), (1, (int(targets[0]), 3))):
        moved = []
        for sign in (1, -1):
            given = [hidden.clone(), weight.clone()]
            given[which][place] += sign * step
            moved.append(value(*given))
        assert float(gradients[which][place]) == pytest.approx((moved[0] - moved[1]) / (2 * step), abs=1e-7)


def test_bfloat16_adds_up_over_ranks_in_float32(ranks, sizes):
    hidden, weight, _, targets = inputs(300, dtype=torch.bfloat16)
    check(ranks, sizes, hidden, weight, None, targets, with_entropy=True, tolerance={"rtol": 0.02, "atol": 0.02})


def test_a_target_that_is_no_id_is_refused_in_all_ranks(ranks, sizes):
    hidden, weight, bias, targets = inputs(3)
    targets[1] = VOCAB
    for found in ranks.outcomes(hidden, weight, bias, targets, sizes=sizes[0]):
        assert found.startswith("targets must be ids from 0 to 22, got ")


def test_a_rank_holds_a_chunk_of_its_own_logits_at_most(ranks, sizes):
    num_tokens, rows = 1536, 4096
    sizes = [rows] * len(sizes[0])
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 4, generator=generator) for n in (num_tokens, sum(sizes)))
    ranks.outcomes(hidden, weight, None, torch.arange(num_tokens) % sum(sizes), sizes=sizes, with_entropy=True)
    assert ranks.largest <= 1024 * rows
