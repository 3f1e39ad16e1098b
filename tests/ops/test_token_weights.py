"""Token weights: a sum over any cut of the step is the reduction of the whole step."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.ops import token_weights

F64 = torch.float64
REDUCTIONS = ["token_mean", "sequence_mean", "prompt_mean", "constant_length"]
seeded = settings(derandomize=True, deadline=None, max_examples=60)
# one token: loss, trainable, sequence, and prompt derived from the sequence (sequences 0-1, 2-3, 4-5 share a prompt)
steps = st.lists(
    st.tuples(st.integers(-99, 99), st.booleans(), st.integers(0, 5)),
    min_size=1,
    max_size=24,
)


def weights_of(step, reduction, order=None):
    rows = step if order is None else [step[i] for i in order]
    mask = torch.tensor([m for _, m, _ in rows], dtype=torch.bool)
    ids = torch.tensor([s for _, _, s in rows], dtype=torch.long)
    return token_weights(mask, ids, reduction=reduction, group_ids=ids // 2, max_response_tokens=8)


def slow_mean(step, reduction):
    """The reduced loss by lists of lists: no weights anywhere."""
    kept = [(loss, s) for loss, trainable, s in step if trainable]
    if not kept:
        return 0.0
    by = {"prompt_mean": lambda s: s // 2, "token_mean": lambda s: 0}.get(reduction, lambda s: s)
    parts = {}
    for loss, s in kept:
        parts.setdefault(by(s), []).append(loss)
    if reduction == "constant_length":
        return sum(sum(part) / 8 for part in parts.values()) / len(parts)
    return sum(sum(part) / len(part) for part in parts.values()) / len(parts)


# P: one token of loss 4; Q: three tokens of loss 1
PQ = [(4, True, 0), (1, True, 2), (1, True, 2), (1, True, 2)]


@pytest.mark.parametrize(
    "reduction, weights, loss",
    [
        ("token_mean", [1 / 4, 1 / 4, 1 / 4, 1 / 4], 1.75),  # (4 + 3) / 4
        ("sequence_mean", [1 / 2, 1 / 6, 1 / 6, 1 / 6], 2.5),  # (4 + 1) / 2
        ("prompt_mean", [1 / 2, 1 / 6, 1 / 6, 1 / 6], 2.5),  # P and Q are of two prompts
        ("constant_length", [1 / 16, 1 / 16, 1 / 16, 1 / 16], 0.4375),  # 7 / (2 * 8)
    ],
)
@pytest.mark.parametrize("padding", [0, 3])
def test_by_hand(reduction, weights, loss, padding):
    step = PQ + [(999, False, 0)] * padding + [(999, False, 5)] * padding
    found = weights_of(step, reduction)
    assert found.tolist() == pytest.approx(weights + [0.0] * 2 * padding, abs=1e-15)
    total = sum(w * x for w, (x, _, _) in zip(found.tolist(), step, strict=True))
    assert total == pytest.approx(loss, abs=1e-12)


@pytest.mark.parametrize("cuts", [[[0, 1, 2, 3]], [[0], [1, 2, 3]], [[0, 1], [2], [3]], [[0], [1, 2, 3], []]])
@pytest.mark.parametrize("reduction, loss", [("token_mean", 1.75), ("sequence_mean", 2.5), ("constant_length", 0.4375)])
def test_the_cut_does_not_matter(cuts, reduction, loss):
    # weights are computed once over {P, Q}; micro-batches and ranks, one of them without tokens, only sum
    weights = weights_of(PQ, reduction)
    losses = torch.tensor([4.0, 1, 1, 1], dtype=F64)
    assert sum((weights[cut] * losses[cut]).sum().item() for cut in cuts) == pytest.approx(loss, abs=1e-12)


def test_two_sequences_of_one_prompt_share_its_weight():
    # prompt 0 has sequences of 1 and 3 tokens, prompt 1 one of 2: 1 / (2 * 4) each, then 1 / (2 * 2) each
    step = [(0, True, 0)] + [(0, True, 1)] * 3 + [(0, True, 2)] * 2
    assert weights_of(step, "prompt_mean").tolist() == pytest.approx([1 / 8] * 4 + [1 / 4] * 2, abs=1e-15)


def test_parts_of_one_rollout_share_its_weight():
    # rollout 0 in two separate runs of tokens, rollout 1 between them
    mask, ids = torch.ones(4, dtype=torch.bool), torch.tensor([0, 1, 0, 0])
    weights = token_weights(mask, ids, reduction="sequence_mean")
    assert weights.tolist() == pytest.approx([1 / 6, 1 / 2, 1 / 6, 1 / 6], abs=1e-15)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@seeded
@given(step=steps)
def test_weighted_sum_equals_the_slow_reduction(reduction, step):
    weights = weights_of(step, reduction).tolist()
    total = math.fsum(w * x for w, (x, _, _) in zip(weights, step, strict=True))
    assert total == pytest.approx(slow_mean(step, reduction), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "prompt_mean"])
@seeded
@given(step=steps)
def test_weights_of_a_mean_sum_to_one(reduction, step):
    total = weights_of(step, reduction).sum().item()
    assert total == pytest.approx(1.0 if any(m for _, m, _ in step) else 0.0, abs=1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@seeded
@given(step=steps, data=st.data())
def test_order_of_tokens_does_not_matter(reduction, step, data):
    order = data.draw(st.permutations(range(len(step))))
    assert weights_of(step, reduction, order).tolist() == weights_of(step, reduction)[order].tolist()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@seeded
@given(step=steps)
def test_masked_tokens_are_as_if_removed(reduction, step):
    kept = [row for row in step if row[1]]
    weights = weights_of(step, reduction)
    assert weights[torch.tensor([m for _, m, _ in step])].tolist() == weights_of(kept, reduction).tolist()
    assert weights[~torch.tensor([m for _, m, _ in step])].eq(0).all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@seeded
@given(step=steps)
def test_names_of_sequences_do_not_matter(reduction, step):
    mask, ids = torch.tensor([m for _, m, _ in step]), torch.tensor([s for _, _, s in step])
    renamed = torch.tensor([10**12, -1, 4, 3, 99, 0])[ids]
    weights = token_weights(mask, renamed, reduction=reduction, group_ids=-7 * (ids // 2), max_response_tokens=8)
    assert weights.tolist() == weights_of(step, reduction).tolist()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("num_tokens", [0, 4])
def test_nothing_trainable_gives_zeros(reduction, num_tokens):
    assert weights_of([(1, False, 0)] * num_tokens, reduction).tolist() == [0.0] * num_tokens


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_truncated_sequences_that_are_masked_do_not_dilute_the_mean(reduction):
    # X: 2 tokens of loss 1. Y: 6 tokens, truncated and masked. Mean of X alone: 1; constant_length 2 / 8
    step = [(1, True, 0)] * 2 + [(1, False, 2)] * 6
    expected = 0.25 if reduction == "constant_length" else 1.0
    assert weights_of(step, reduction).sum().item() == pytest.approx(expected, abs=1e-12)


def test_weights_are_float64_and_exact_for_many_tokens():
    # float32 cannot count beyond 2^24 one by one and would not sum to 1 this closely
    weights = token_weights(torch.ones(300_001, dtype=torch.bool), torch.arange(300_001), reduction="sequence_mean")
    assert weights.dtype == F64
    assert weights.sum().item() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_a_mask_that_is_not_bool_is_refused(dtype):
    with pytest.raises(ValueError, match="loss_mask must be bool"):
        token_weights(torch.ones(2, dtype=dtype), torch.zeros(2, dtype=torch.long), reduction="token_mean")


@pytest.mark.parametrize("ids", [(3,), (1,), (2, 1)])
def test_sequence_ids_of_another_shape_are_refused(ids):
    with pytest.raises(ValueError, match="share a shape"):
        token_weights(torch.ones(2, dtype=torch.bool), torch.zeros(ids, dtype=torch.long), reduction="token_mean")


def test_group_ids_of_another_shape_are_refused():
    mask, ids = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="group_ids"):
        token_weights(mask, ids, reduction="prompt_mean", group_ids=torch.zeros(1, dtype=torch.long))


# What is wrong is wrong whatever the mask holds: an error that only comes with the data comes late.
@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize(
    "options, message",
    [
        ({"reduction": "prompt_mean"}, "group_ids"),
        ({"reduction": "constant_length"}, "max_response_tokens"),
        ({"reduction": "constant_length", "max_response_tokens": 0}, "max_response_tokens"),
        ({"reduction": "token-mean"}, "reduction must be"),
    ],
)
def test_a_reduction_that_lacks_what_it_needs_is_refused(options, message, trainable):
    with pytest.raises(ValueError, match=message):
        token_weights(torch.full((2,), trainable), torch.zeros(2, dtype=torch.long), **options)


def test_the_slow_reference_counts_as_one_would_by_hand():
    # guards the guard: 3 sequences in 2 prompts
    step = [(6, True, 0), (2, True, 1), (4, True, 1), (3, True, 4), (9, False, 4)]
    assert Counter({r: slow_mean(step, r) for r in REDUCTIONS}) == {
        "token_mean": 15 / 4,
        "sequence_mean": (6 + 3 + 3) / 3,
        "prompt_mean": (12 / 3 + 3) / 2,
        "constant_length": (6 / 8 + 6 / 8 + 3 / 8) / 3,
    }
