"""GSPO, GSPO-token, GMPO and TOPR: losses of whole sequences, against loops over sequences and tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import F64, SEQUENCES, flat, gradient, log_ratios, mean, spread

from strop.ops import ppo_clip
from strop.ops.policy_loss import gmpo, gspo, gspo_token, importance_sampling, reinforce, topr

seeded = settings(derandomize=True, deadline=None, max_examples=60)
BANDS = [(0.2, 0.28), (3e-4, 4e-4), (0.0, 0.0), (1.0, math.inf)]
CALLS = {
    "gspo": lambda *t: gspo(*t, eps_clip=0.2, eps_clip_high=0.28),
    "gspo_token": lambda *t: gspo_token(*t, eps_clip=0.2, eps_clip_high=0.28),
    "gmpo": lambda *t: gmpo(*t, eps_clip=0.4, eps_clip_high=0.4),
    "topr": lambda *t: topr(*t, max_ratio=1.5),
}
every_loss = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def two_sequences(log_ratio_a, log_ratio_b, advantage_a, advantage_b, *, logprob=-1.0):
    """Sequences of the given log-ratios, a None among them being a masked token."""

    def tokens(ratios):
        return [(logprob, 9.0 if r is None else r, r is not None) for r in ratios]

    return flat([(advantage_a, tokens(log_ratio_a)), (advantage_b, tokens(log_ratio_b))])


# ---- GSPO ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [gspo, gspo_token])
@pytest.mark.parametrize(
    "band, loss, slope, clipped",
    [
        # case 16. Log-ratios .3 and .1, the third masked: s = exp(.2) = 1.221403. Within 1.28: loss -s. The mean over the two
        # tokens has gradient -s / 2 = -.610701 at each; the sum of two has -s.
        (0.28, -1.221403, -0.610701, False),
        # above 1.2: loss -1.2, gradient 0
        (0.2, -1.2, 0.0, True),
    ],
)
def test_gspo_by_hand(call, band, loss, slope, clipped):
    tokens = two_sequences([0.3, 0.1, None], [0.0], 1.0, 0.0)
    found = call(*tokens, eps_clip=band, eps_clip_high=band)
    assert found.loss.tolist() == pytest.approx([loss, loss, 0.0, 0.0], abs=1e-6)
    assert found.clipped.tolist() == [clipped, clipped, False, False]
    # the mean over the sequence's two trainable tokens
    assert gradient(found.loss / 2, tokens.logprobs).tolist() == pytest.approx([slope, slope, 0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("call", [gspo, gspo_token])
def test_gspo_clips_below_for_bad_sequences_and_never_above(call):
    # s = exp(-.5) = .606531: A = -1: max(.6065, .8) = .8, gradient 0.  s = exp(.5) = 1.648721, A = -1: max(1.6487, 1.28)
    tokens = two_sequences([-0.7, -0.3], [0.9, 0.1], -1.0, -1.0)
    found = call(*tokens, eps_clip=0.2, eps_clip_high=0.28)
    assert found.loss.tolist() == pytest.approx([0.8, 0.8, 1.648721, 1.648721], abs=1e-6)
    assert found.clipped.tolist() == [True, True, False, False]
    assert gradient(found.loss, tokens.logprobs).tolist() == pytest.approx([0, 0, 1.648721, 1.648721], abs=1e-6)


def slow_gspo(sequences, low, high):
    """(losses, gradients of their sum, clipped, distance to the nearest edge) per sequence."""
    for advantage, tokens in sequences:
        s = math.exp(mean(log_ratios(tokens)))
        if advantage > 0 and s > 1 + high:
            yield -advantage * (1 + high), 0.0, True, s
        elif advantage < 0 and s < 1 - low:
            yield -advantage * (1 - low), 0.0, True, s
        else:
            # n tokens of one loss, each token a share of 1 / n in the exponent
            yield -advantage * s, -advantage * s, False, s


@pytest.mark.parametrize("call", [gspo, gspo_token])
@pytest.mark.parametrize("band", BANDS)
@seeded
@given(sequences=SEQUENCES)
def test_gspo_equals_the_slow_reference(call, band, sequences):
    low, high = band
    tokens = flat(sequences)
    loss, clipped = call(*tokens, eps_clip=low, eps_clip_high=high)
    slopes, start = gradient(loss, tokens.logprobs), 0
    reference = slow_gspo(sequences, low, high)
    for (_, row), (value, slope, is_clipped, s) in zip(sequences, reference, strict=True):
        at, count = slice(start, start + len(row)), sum(m for _, _, m in row)
        start += len(row)
        assert loss[at].tolist() == pytest.approx(spread(row, [value] * count), rel=1e-11, abs=1e-11)
        if abs(s - 1 + low) > 1e-9 and abs(s - 1 - high) > 1e-9:  # at a kink either one-sided slope is right
            assert slopes[at].tolist() == pytest.approx(spread(row, [slope] * count), rel=1e-11, abs=1e-11)
            assert clipped[at].tolist() == [m and is_clipped for _, _, m in row]


def test_the_advantages_of_gspo_token_may_differ_within_a_sequence():
    # s = exp(.2) = 1.221403; A = 1: -1.221403; A = 2 the double; A = -1: +1.221403. Each token's gradient is its own loss.
    tokens = two_sequences([0.3, 0.1, 0.2], [0.0], 1.0, 0.0)
    advantages = torch.tensor([1.0, 2.0, -1.0, 0.0], dtype=F64)
    found = gspo_token(tokens[0], tokens[1], advantages, *tokens[3:], eps_clip=0.28, eps_clip_high=0.28)
    expected = [-1.221403, -2.442806, 1.221403, 0.0]
    assert found.loss.tolist() == pytest.approx(expected, abs=1e-6)
    assert gradient(found.loss, tokens.logprobs).tolist() == pytest.approx(expected, abs=1e-6)


def test_only_gspo_token_keeps_gradients_of_tokens_apart():
    # weights .75 and .25 instead of equal ones: GSPO spreads -A s x 1 over both, GSPO-token leaves each its weight
    tokens = two_sequences([0.0, 0.0], [0.0], 1.0, 0.0)
    weights = torch.tensor([0.75, 0.25, 0.0], dtype=F64)
    found = {
        call: gradient(weights * call(*tokens, eps_clip=0.2, eps_clip_high=0.2).loss, tokens.logprobs).tolist()
        for call in (gspo, gspo_token)
    }
    assert found[gspo] == pytest.approx([-0.5, -0.5, 0.0], abs=1e-12)
    assert found[gspo_token] == pytest.approx([-0.75, -0.25, 0.0], abs=1e-12)


@pytest.mark.parametrize("call", [gspo, gspo_token])
@seeded
@given(st.lists(st.tuples(st.floats(-3, -0.1), st.floats(-2, 2), st.integers(-64, 64)), min_size=1, max_size=8))
def test_gspo_of_one_token_sequences_is_ppo_clip(call, rows):
    tokens = flat([(a / 32, [(x, d, True)]) for x, d, a in rows])
    loss, clipped = call(*tokens, eps_clip=0.2, eps_clip_high=0.28)
    expected = ppo_clip(*tokens[:3], eps_clip=0.2, eps_clip_high=0.28)
    assert loss.tolist() == pytest.approx(expected.loss.tolist(), rel=1e-12, abs=1e-12)
    assert clipped.tolist() == expected.clipped.tolist()
    slopes = [gradient(x, tokens.logprobs).tolist() for x in (loss, expected.loss)]
    assert slopes[0] == pytest.approx(slopes[1], rel=1e-12, abs=1e-12)


# ---- GMPO ------------------------------------------------------------------------------------------------------------


def test_gmpo_by_hand():
    # A = 1: log-ratios .6 -> .4, .2 stays: exp(.3) = 1.349859. The clipped token has no gradient; the other has half of the
    # loss per token, twice: -1.349859.
    # A = -2: -.6 -> -.4, +.6 stays (no upper bound where A < 0): exp(.1) = 1.105171, loss 2.210342.
    tokens = two_sequences([0.6, None, 0.2], [-0.6, 0.6], 1.0, -2.0)
    loss, clipped = gmpo(*tokens, eps_clip=0.4, eps_clip_high=0.4)
    assert loss.tolist() == pytest.approx([-1.349859, 0.0, -1.349859, 2.210342, 2.210342], abs=1e-6)
    assert clipped.tolist() == [True, False, False, True, False]
    expected = [0.0, 0.0, -1.349859, 0.0, 2.210342]
    assert gradient(loss, tokens.logprobs).tolist() == pytest.approx(expected, abs=1e-6)


def test_where_every_token_is_clipped_gmpo_keeps_its_value_and_has_no_gradient_at_all():
    # A = 1: .6 and .9 -> .4 and .4: -e^.4 = -1.491825.  A = -2: -.6 and -.5 -> -.4: 2 e^-.4 = 1.340640
    tokens = two_sequences([0.6, 0.9], [-0.6, -0.5], 1.0, -2.0)
    loss, clipped = gmpo(*tokens, eps_clip=0.4, eps_clip_high=0.4)
    assert loss.tolist() == pytest.approx([-1.491825, -1.491825, 1.340640, 1.340640], abs=1e-6)
    assert clipped.all()
    assert gradient(loss, tokens.logprobs).tolist() == [0.0] * 4


@pytest.mark.parametrize("band", [(0.4, 0.4), (0.1, 0.9), (0.0, 0.0), (math.inf, math.inf)])
@seeded
@given(sequences=SEQUENCES)
def test_gmpo_equals_the_slow_reference(band, sequences):
    low, high = band
    tokens = flat(sequences)
    loss, clipped = gmpo(*tokens, eps_clip=low, eps_clip_high=high)
    slopes, start = gradient(loss, tokens.logprobs), 0
    for advantage, row in sequences:
        at = slice(start, start + len(row))
        start += len(row)
        raw = log_ratios(row)
        bounded = [min(r, high) if advantage > 0 else max(r, -low) if advantage < 0 else r for r in raw]
        value = -advantage * math.exp(mean(bounded))
        cut = [b != r for b, r in zip(bounded, raw, strict=True)]
        assert loss[at].tolist() == pytest.approx(spread(row, [value] * len(raw)), rel=1e-11, abs=1e-11)
        assert clipped[at].tolist() == [bool(x) for x in spread(row, cut)]
        if all(min(abs(r - high), abs(r + low)) > 1e-9 for r in raw):
            expected = spread(row, [0.0 if c else value for c in cut])
            assert slopes[at].tolist() == pytest.approx(expected, rel=1e-11, abs=1e-11)


@seeded
@given(SEQUENCES)
def test_without_bounds_gmpo_is_gspo_without_bounds(sequences):
    tokens = flat(sequences)
    a = gmpo(*tokens, eps_clip=math.inf, eps_clip_high=math.inf).loss
    b = gspo(*tokens, eps_clip=1.0, eps_clip_high=math.inf).loss
    assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    slopes = [gradient(x, tokens.logprobs) for x in (a, b)]
    assert torch.allclose(*slopes, rtol=1e-12, atol=1e-12)


def test_gmpo_of_one_token_is_ppo_clip_with_the_bounds_as_ratios():
    # ratios of e^-.4 and e^.4 are 1 - .32968 and 1 + .491825
    tokens = flat([(a, [(-1.0, d, True)]) for a in (1.0, -0.5) for d in (-1.0, -0.3, 0.0, 0.3, 1.0)])
    loss, clipped = gmpo(*tokens, eps_clip=0.4, eps_clip_high=0.4)
    expected = ppo_clip(*tokens[:3], eps_clip=1 - math.exp(-0.4), eps_clip_high=math.exp(0.4) - 1)
    assert loss.tolist() == pytest.approx(expected.loss.tolist(), rel=1e-12)
    assert clipped.tolist() == expected.clipped.tolist()


@pytest.mark.parametrize("call", [CALLS["gspo"], CALLS["gspo_token"], CALLS["gmpo"]])
def test_equal_ratios_within_the_bounds_give_importance_sampling(call):
    tokens = flat([(a, [(-0.5, d, True)] * n) for a, d, n in ((1.0, 0.1, 3), (-2.0, -0.15, 2), (0.5, 0.2, 1))])
    loss, expected = call(*tokens).loss, importance_sampling(*tokens[:3]).loss
    assert torch.allclose(loss, expected, rtol=1e-12, atol=0)
    assert torch.allclose(gradient(loss, tokens.logprobs), gradient(expected, tokens.logprobs), rtol=1e-12, atol=0)


# ---- TOPR ------------------------------------------------------------------------------------------------------------


def test_topr_by_hand():
    # A = 2: -2 x -1 = 2, weight 1 whatever the ratio (e^.8).
    # A = -1: R = exp(-.5 - .2) = .496585, below 1: -.496585 x -1 x -1 = -.496585; the masked token enters no sum
    tokens = two_sequences([0.5, 0.3], [-0.5, None, -0.2], 2.0, -1.0)
    loss, clipped = topr(*tokens, max_ratio=1.0)
    assert loss.tolist() == pytest.approx([2.0, 2.0, -0.496585, 0.0, -0.496585], abs=1e-6)
    assert clipped.tolist() == [False] * 5
    # gradient -weight A, through no ratio
    expected = [-2.0, -2.0, 0.496585, 0.0, 0.496585]
    assert gradient(loss, tokens.logprobs).tolist() == pytest.approx(expected, abs=1e-6)


def test_topr_cuts_the_weight_of_bad_answers_alone():
    # R = e^.7 = 2.01 above 1.5 on both; A > 0 has weight 1
    tokens = two_sequences([0.5, 0.2], [0.5, 0.2], -1.0, 1.0)
    loss, clipped = topr(*tokens, max_ratio=1.5)
    assert loss.tolist() == pytest.approx([-1.5, -1.5, 1.0, 1.0], abs=1e-12)
    assert clipped.tolist() == [True, True, False, False]


@pytest.mark.parametrize("max_ratio", [1.0, 0.25, math.inf])
@seeded
@given(sequences=SEQUENCES)
def test_topr_equals_the_slow_reference(max_ratio, sequences):
    tokens = flat(sequences)
    loss, clipped = topr(*tokens, max_ratio=max_ratio)
    slopes, start = gradient(loss, tokens.logprobs), 0
    for advantage, row in sequences:
        at = slice(start, start + len(row))
        start += len(row)
        ratio = math.exp(math.fsum(log_ratios(row)))
        weight = min(ratio, max_ratio) if advantage < 0 else 1.0
        values = spread(row, [-weight * advantage * x for x, _, m in row if m])
        assert loss[at].tolist() == pytest.approx(values, rel=1e-11, abs=1e-11)
        expected = spread(row, [-weight * advantage for *_, m in row if m])
        assert slopes[at].tolist() == pytest.approx(expected, rel=1e-11, abs=1e-11)
        if abs(ratio - max_ratio) > 1e-9:
            assert clipped[at].tolist() == [m and advantage < 0 and ratio > max_ratio for *_, m in row]


# ---- what all of them share ------------------------------------------------------------------------------------------

# Mean log-ratios -.3, .1, .7 and -.05: within and beyond each bound, none within .04 of one (log .8 = -.22, log 1.28 = .25)
# and no log-ratio within .1 of -.4 or .4.
AWAY_FROM_KINKS = [
    (1.5, [(-1.0, -0.6, True), (-2.0, 0.0, True), (-0.3, 5.0, False)]),
    (-0.7, [(-1.0, -0.6, True), (-2.0, 0.0, True)]),
    (1.2, [(-1.5, 0.1, True)]),
    (-0.4, [(-1.5, 0.1, True), (-1.5, 0.1, True)]),
    (0.9, [(-0.5, 0.6, True), (-0.7, 0.8, True)]),
    (-0.9, [(-0.5, 0.6, True), (-4.0, 1.9, False), (-0.7, 0.8, True)]),
]


@pytest.mark.parametrize("call", [CALLS["gspo"], CALLS["gmpo"]], ids=["gspo", "gmpo"])
def test_gradcheck_away_from_kinks(call):
    tokens = flat(AWAY_FROM_KINKS)
    assert torch.autograd.gradcheck(lambda x: call(x, *tokens[1:]).loss, (tokens.logprobs,))


@pytest.mark.parametrize("call", [CALLS["topr"]], ids=["topr"])
def test_gradcheck_with_the_weight_held_constant(call):
    # Finite differences would also move the weight, so old_logprobs moves along: the ratio then stands still.
    tokens = flat(AWAY_FROM_KINKS)
    gap = (tokens.logprobs - tokens.old_logprobs).detach()
    assert torch.autograd.gradcheck(lambda x: call(x, x - gap, *tokens[2:]).loss, (tokens.logprobs,))


@every_loss
def test_on_policy_the_gradient_is_that_of_reinforce(call):
    tokens = flat([(a, [(x, 0.0, m) for x, _, m in row]) for a, row in AWAY_FROM_KINKS])
    loss, clipped = call(*tokens)
    expected = torch.where(tokens.loss_mask, gradient(reinforce(tokens[0], tokens[2]).loss, tokens.logprobs), 0.0)
    assert torch.allclose(gradient(loss, tokens.logprobs), expected, rtol=1e-12, atol=1e-12)
    assert not clipped.any()


@every_loss
@pytest.mark.parametrize("planted", [math.nan, math.inf, -math.inf, 1e30])
def test_what_stands_in_masked_slots_changes_nothing(call, planted):
    clean, spoiled = flat(AWAY_FROM_KINKS), flat(AWAY_FROM_KINKS, planted=planted)
    a, b = call(*clean), call(*spoiled)
    assert torch.equal(a.loss, b.loss)
    assert torch.equal(a.clipped, b.clipped)
    assert torch.equal(gradient(a.loss, clean.logprobs), gradient(b.loss, spoiled.logprobs))
    assert a.loss[~clean.loss_mask].tolist() == [0.0, 0.0]


@every_loss
@seeded
@given(sequences=SEQUENCES)
def test_masked_tokens_are_as_good_as_removed(call, sequences):
    tokens = flat(sequences)
    kept = tokens.at(tokens.loss_mask)
    whole, removed = call(*tokens), call(*kept)
    assert torch.allclose(whole.loss[tokens.loss_mask], removed.loss, rtol=1e-12, atol=1e-12)
    slopes = gradient(whole.loss, tokens.logprobs)
    assert torch.allclose(slopes[tokens.loss_mask], gradient(removed.loss, kept.logprobs), rtol=1e-12, atol=1e-12)
    assert not slopes[~tokens.loss_mask].any()


@every_loss
@seeded
@given(sequences=SEQUENCES, data=st.data())
def test_order_of_tokens_names_and_splits_of_sequences_do_not_matter(call, sequences, data):
    tokens = flat(sequences)
    whole = call(*tokens).loss
    slopes = gradient(whole, tokens.logprobs)
    order = torch.tensor(data.draw(st.permutations(range(len(whole)))))
    cut = data.draw(st.integers(0, len(sequences)))
    in_first = (tokens.sequence_ids[order] - 1) // 3 < cut
    names = torch.tensor([10**12, -3, 0, 77, 5])
    for rows in (order[in_first], order[~in_first]):
        part = tokens.at(rows)
        part = part._replace(sequence_ids=names[(part.sequence_ids - 1) // 3])
        loss = call(*part).loss
        # sums of a sequence's tokens in another order
        assert torch.allclose(loss, whole[rows], rtol=1e-11, atol=1e-12)
        assert torch.allclose(gradient(loss, part.logprobs), slopes[rows], rtol=1e-11, atol=1e-12)


@every_loss
@pytest.mark.parametrize("log_ratio", [-1e4, -89.0, 89.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_extreme_log_ratios_give_finite_loss_and_gradient_in_float32(call, log_ratio, advantage):
    tokens = flat([(advantage, [(-1.0, log_ratio, True), (-1.0, log_ratio, True)])], dtype=torch.float32)
    loss = call(*tokens).loss
    assert loss.dtype == torch.float32
    assert loss.isfinite().all()
    assert gradient(loss, tokens.logprobs).isfinite().all()


@every_loss
@pytest.mark.parametrize("spoiled", ["logprobs", "old_logprobs", "advantages"])
def test_a_nan_in_a_trainable_slot_is_not_hidden_and_spoils_no_other_sequence(call, spoiled):
    tokens = flat([(-1.0, [(-1.0, 0.1, True)] * 2), (-1.0, [(-1.0, 0.1, True)] * 2)])
    values = getattr(tokens, spoiled).detach().clone()
    values[1] = math.nan
    loss = call(*tokens._replace(**{spoiled: values})).loss
    assert loss[1].isnan()
    assert loss[2:].isfinite().all()


@every_loss
def test_gradient_flows_through_logprobs_alone(call):
    tokens = flat(AWAY_FROM_KINKS)
    others = [tokens.old_logprobs.clone().requires_grad_(), tokens.advantages.clone().requires_grad_()]
    call(tokens.logprobs, *others, *tokens[3:]).loss.sum().backward()
    assert tokens.logprobs.grad is not None
    assert [x.grad for x in others] == [None, None]


@every_loss
def test_rows_and_columns_are_kept(call):
    # two sequences, one of them over the end of the row
    tokens = flat([(1.0, [(-1.0, 0.1, True)] * 4), (-1.0, [(-1.0, -0.9, True)] * 2)])
    table = call(*(x.view(2, 3) for x in tokens))
    assert table.loss.shape == table.clipped.shape == (2, 3)
    assert torch.equal(table.loss.flatten(), call(*tokens).loss)


@every_loss
def test_no_tokens_give_no_loss(call):
    empty = torch.zeros(0, dtype=F64)
    assert call(empty, empty, empty, empty.bool(), empty.long()).loss.shape == (0,)


@every_loss
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(call, dtype):
    tokens = flat(AWAY_FROM_KINKS, dtype=dtype)
    loss = call(*tokens).loss
    assert loss.dtype == torch.float32
    assert torch.equal(loss, call(*(x.float() for x in tokens[:3]), *tokens[3:]).loss)


@every_loss
def test_masks_and_shapes_that_do_not_fit_are_refused(call):
    tokens = flat([(1.0, [(-1.0, 0.1, True)] * 3)])
    with pytest.raises(ValueError, match="loss_mask must be bool"):
        call(*tokens._replace(loss_mask=tokens.loss_mask.long()))
    for name in ("logprobs", "old_logprobs", "advantages", "loss_mask", "sequence_ids"):
        with pytest.raises(ValueError, match="must share a shape"):
            call(*tokens._replace(**{name: getattr(tokens, name)[:1]}))


@pytest.mark.parametrize("call", [gspo, gspo_token, gmpo])
@pytest.mark.parametrize("band", [(-0.1, 0.2), (0.2, -0.1), (math.nan, 0.2), (0.2, math.nan)])
def test_a_bound_that_is_no_distance_is_refused(call, band):
    with pytest.raises(ValueError, match="eps_clip"):
        call(*flat([(1.0, [(-1.0, 0.1, True)])]), eps_clip=band[0], eps_clip_high=band[1])


@pytest.mark.parametrize("max_ratio", [0.0, -1.0, math.nan])
def test_a_ratio_of_topr_that_is_not_positive_is_refused(max_ratio):
    with pytest.raises(ValueError, match="max_ratio must be > 0"):
        topr(*flat([(1.0, [(-1.0, 0.1, True)])]), max_ratio=max_ratio)
