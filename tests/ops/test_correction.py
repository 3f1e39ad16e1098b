"""Corrections for the gap between sampler and trainer: truncate, mask, veto and OPSM, against loops over sequences."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import F64, SEQUENCES, flat, log_ratios, mean

from strop.ops.correction import mask, opsm, truncate, veto

seeded = settings(derandomize=True, deadline=None, max_examples=60)
LEVELS = ["token", "sequence_sum", "sequence_mean"]
# `flat` gives a pair of log-probabilities; here the first is the trainer's (old) and the second the sampler's
CALLS = {
    f"{call.__name__} {level}": lambda t, call=call, level=level: call(
        t.logprobs, t.old_logprobs, t.loss_mask, t.sequence_ids, level=level, min_ratio=0.5, max_ratio=2.0
    )
    for call in (truncate, mask)
    for level in LEVELS
}
CALLS["veto"] = lambda t: veto(t.logprobs, t.old_logprobs, t.loss_mask, t.sequence_ids, min_token_ratio=0.5)
CALLS["opsm"] = lambda t: opsm(*t, opsm_delta=0.1)
every_correction = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)

# ratios e^.9 = 2.4596, e^-.1 = .9048 and, masked, e^7 | e^-1 = .3679
#   sums .8 -> 2.2255 | -1;  means .4 -> 1.4918 | -1
THREE = [(1.0, [(-1.0, 0.9, True), (-1.0, 7.0, False), (-1.0, -0.1, True)]), (-1.0, [(-2.0, -1.0, True)])]


@pytest.mark.parametrize(
    "level, truncated, masked",
    [
        ("token", [2.0, 1.0, 0.904837, 0.5], [0.0, 1.0, 0.904837, 0.0]),
        ("sequence_sum", [2.0, 1.0, 2.0, 0.5], [0.0, 1.0, 0.0, 0.0]),
        ("sequence_mean", [1.491825, 1.0, 1.491825, 0.5], [1.491825, 1.0, 1.491825, 0.0]),
    ],
)
def test_truncate_and_mask_by_hand(level, truncated, masked):
    tokens = flat(THREE)
    arguments = tokens.logprobs, tokens.old_logprobs, tokens.loss_mask, tokens.sequence_ids
    options = {"level": level, "min_ratio": 0.5, "max_ratio": 2.0}
    assert truncate(*arguments, **options).tolist() == pytest.approx(truncated, abs=1e-6)
    assert mask(*arguments, **options).tolist() == pytest.approx(masked, abs=1e-6)


def slow_ratios(tokens, level):
    """The ratio at each trainable token of a sequence."""
    gaps = log_ratios(tokens)
    if level == "sequence_sum":
        gaps = [math.fsum(gaps)] * len(gaps)
    if level == "sequence_mean":
        gaps = [mean(gaps)] * len(gaps)
    return [math.exp(gap) for gap in gaps]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("low, high", [(0.0, 2.0), (0.5, 5.0), (1.0, 1.0), (0.0, math.inf)])
@seeded
@given(sequences=SEQUENCES)
def test_truncate_and_mask_equal_the_slow_reference(level, low, high, sequences):
    tokens = flat(sequences)
    arguments = tokens.logprobs, tokens.old_logprobs, tokens.loss_mask, tokens.sequence_ids
    options = {"level": level, "min_ratio": low, "max_ratio": high}
    truncated, masked, at = truncate(*arguments, **options), mask(*arguments, **options), 0
    for _, row in sequences:
        ratios = iter(slow_ratios(row, level))
        for *_, is_trainable in row:
            ratio = next(ratios) if is_trainable else 1.0
            if not is_trainable:
                assert truncated[at].item() == masked[at].item() == 1.0
            else:
                assert truncated[at].item() == pytest.approx(min(max(ratio, low), high), rel=1e-11)
                if min(abs(ratio - low), abs(ratio - high)) > 1e-9:
                    expected = ratio if low < ratio < high else 0.0
                    assert masked[at].item() == pytest.approx(expected, rel=1e-11)
            at += 1


def test_the_bounds_themselves_are_kept():
    zero, keep = torch.zeros(1, dtype=F64), torch.ones(1, dtype=torch.bool)
    arguments = zero, zero, keep, torch.zeros(1).long()
    assert mask(*arguments, level="token", min_ratio=1.0, max_ratio=1.0).item() == 1.0
    assert truncate(*arguments, level="token", min_ratio=1.0, max_ratio=1.0).item() == 1.0
    assert veto(*arguments, min_token_ratio=1.0).item() == 1.0


@seeded
@given(SEQUENCES)
def test_in_sequences_of_one_token_all_levels_agree(sequences):
    tokens = flat([(a, [token]) for a, row in sequences for token in row])
    arguments = tokens.logprobs, tokens.old_logprobs, tokens.loss_mask, tokens.sequence_ids
    for call in (truncate, mask):
        found = [call(*arguments, level=level, min_ratio=0.5, max_ratio=2.0) for level in LEVELS]
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])


@every_correction
def test_equal_policies_need_no_correction(call):
    found = call(flat([(a, [(x, 0.0, m) for x, _, m in row]) for a, row in THREE]))
    assert found.tolist() == [1.0] * 4


# ---- veto ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bound, kept",
    [
        (0.3, [True, True]),
        (0.4, [True, False]),  # e^-1 = .3679
        (0.91, [False, False]),  # e^-.1 = .9048 vetoes its whole sequence
    ],
)
def test_veto_by_hand(bound, kept):
    tokens = flat(THREE)
    found = veto(tokens.logprobs, tokens.old_logprobs, tokens.loss_mask, tokens.sequence_ids, min_token_ratio=bound)
    assert found.tolist() == [
        float(k) for k in (kept[0], True, kept[0], kept[1])
    ]  # the masked token is no one's to veto


@seeded
@given(SEQUENCES)
def test_veto_equals_the_slow_reference(sequences):
    tokens = flat(sequences)
    found = veto(tokens.logprobs, tokens.old_logprobs, tokens.loss_mask, tokens.sequence_ids, min_token_ratio=0.8)
    expected = []
    for _, row in sequences:
        is_vetoed = any(math.exp(gap) < 0.8 for gap in log_ratios(row))
        expected += [0.0 if m and is_vetoed else 1.0 for *_, m in row]
    assert found.tolist() == expected


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan])
def test_a_veto_that_is_not_positive_is_refused(bound):
    with pytest.raises(ValueError, match="min_token_ratio must be > 0"):
        veto(*flat(THREE)[:2], *flat(THREE)[3:], min_token_ratio=bound)


# ---- OPSM ------------------------------------------------------------------------------------------------------------


def test_opsm_by_hand():
    # mean(old - new) = -.3, +.2, +.2, -.2: only the second is bad, moved away by more than .1, and loses both tokens
    sequences = [
        (-1.0, [(-1.0, 0.5, True), (-1.0, 0.1, True)]),
        (-1.0, [(-1.0, -0.5, True), (-1.0, 9.0, False), (-1.0, 0.1, True)]),
        (1.0, [(-1.0, -0.2, True)]),
        (-1.0, [(-1.0, 0.2, True)]),
    ]
    assert opsm(*flat(sequences), opsm_delta=0.1).tolist() == [1, 1, 0, 1, 0, 1, 1]
    assert opsm(*flat(sequences), opsm_delta=0.25).tolist() == [1.0] * 7


@pytest.mark.parametrize("delta", [0.0, 0.1, 1.0])
@seeded
@given(sequences=SEQUENCES)
def test_opsm_equals_the_slow_reference(delta, sequences):
    tokens = flat(sequences)
    found, at = opsm(*tokens, opsm_delta=delta), 0
    for advantage, row in sequences:
        moved = -mean(log_ratios(row))
        for *_, is_trainable in row:
            if abs(moved - delta) > 1e-9:
                assert found[at].item() == float(not (is_trainable and advantage < 0 and moved > delta))
            at += 1


@pytest.mark.parametrize("delta", [-0.1, math.nan])
def test_a_negative_opsm_delta_is_refused(delta):
    with pytest.raises(ValueError, match="opsm_delta must be >= 0"):
        opsm(*flat(THREE), opsm_delta=delta)


# ---- what all of them share ------------------------------------------------------------------------------------------


@every_correction
@pytest.mark.parametrize("planted", [math.nan, math.inf, -math.inf, 1e30])
def test_what_stands_in_masked_slots_changes_nothing(call, planted):
    assert torch.equal(call(flat(THREE, planted=planted)), call(flat(THREE)))


@every_correction
@seeded
@given(sequences=SEQUENCES)
def test_masked_tokens_are_as_good_as_removed(call, sequences):
    tokens = flat(sequences)
    whole, removed = call(tokens)[tokens.loss_mask], call(tokens.at(tokens.loss_mask))
    assert torch.allclose(whole, removed, rtol=1e-12, atol=0)


@every_correction
@seeded
@given(sequences=SEQUENCES, data=st.data())
def test_order_of_tokens_names_and_splits_of_sequences_do_not_matter(call, sequences, data):
    tokens = flat(sequences)
    whole = call(tokens)
    order = torch.tensor(data.draw(st.permutations(range(len(whole)))))
    cut = data.draw(st.integers(0, len(sequences)))
    in_first = (tokens.sequence_ids[order] - 1) // 3 < cut
    names = torch.tensor([10**12, -3, 0, 77, 5])
    for rows in (order[in_first], order[~in_first]):
        part = tokens.at(rows)
        found = call(part._replace(sequence_ids=names[(part.sequence_ids - 1) // 3]))
        assert torch.allclose(found, whole[rows], rtol=1e-11, atol=0)


@every_correction
def test_weights_carry_no_gradient(call):
    tokens = flat(THREE)
    others = [tokens.old_logprobs.clone().requires_grad_(), tokens.advantages.clone().requires_grad_()]
    assert not call(tokens._replace(old_logprobs=others[0], advantages=others[1])).requires_grad


@pytest.mark.parametrize("call", [truncate, mask])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("gap", [89.0, 1e4])
def test_without_an_upper_bound_extreme_gaps_give_finite_weights_in_float32(call, level, gap):
    tokens = flat([(-1.0, [(-1.0, gap, True), (-1.0, gap, True)])], dtype=torch.float32)
    found = call(*tokens[:2], *tokens[3:], level=level, min_ratio=0.0, max_ratio=math.inf)
    assert found.dtype == torch.float32
    assert found.isfinite().all()


@pytest.mark.parametrize("call", [truncate, mask])
@pytest.mark.parametrize("level", LEVELS)
def test_a_nan_in_a_trainable_slot_is_not_hidden(call, level):
    # case 14: a weight of 0 or 1 would let the step go on
    tokens = flat(THREE)
    rollout = tokens.old_logprobs.clone()
    rollout[0] = math.nan
    arguments = tokens.logprobs, rollout, tokens.loss_mask, tokens.sequence_ids
    found = call(*arguments, level=level, min_ratio=0.5, max_ratio=2.0)
    assert found[0].isnan()
    assert found[3].isfinite()


@every_correction
def test_rows_and_columns_are_kept_and_no_tokens_give_no_weights(call):
    tokens = flat(THREE)
    table = call(type(tokens)(*(x.view(2, 2) for x in tokens)))
    assert torch.equal(table.flatten(), call(tokens))
    assert call(tokens.at(slice(0, 0))).shape == (0,)


@every_correction
def test_masks_and_shapes_that_do_not_fit_are_refused(call):
    tokens = flat(THREE)
    with pytest.raises(ValueError, match="loss_mask must be bool"):
        call(tokens._replace(loss_mask=tokens.loss_mask.long()))
    for name in ("logprobs", "old_logprobs", "loss_mask", "sequence_ids"):
        with pytest.raises(ValueError, match="must share a shape"):
            call(tokens._replace(**{name: getattr(tokens, name)[:1]}))


def test_advantages_of_another_shape_are_refused_by_opsm():
    tokens = flat(THREE)
    with pytest.raises(ValueError, match="must share a shape"):
        opsm(*tokens._replace(advantages=tokens.advantages[:1]), opsm_delta=0.1)


@pytest.mark.parametrize("call", [truncate, mask])
@pytest.mark.parametrize("low, high", [(-0.1, 1.0), (2.0, 1.0), (math.nan, 1.0), (0.0, math.nan)])
def test_a_range_that_is_none_is_refused(call, low, high):
    tokens = flat(THREE)
    with pytest.raises(ValueError, match="min_ratio and max_ratio must be"):
        call(*tokens[:2], *tokens[3:], level="token", min_ratio=low, max_ratio=high)


@pytest.mark.parametrize("call", [truncate, mask])
def test_a_level_that_does_not_exist_is_refused(call):
    tokens = flat(THREE)
    with pytest.raises(ValueError, match="level must be token, sequence_sum or sequence_mean, got 'prompt'"):
        call(*tokens[:2], *tokens[3:], level="prompt", min_ratio=0.0, max_ratio=1.0)
