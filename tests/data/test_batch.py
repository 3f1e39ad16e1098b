"""Rollouts and demonstrations as one flat batch: every field beside its token, cut by whole sequences."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop import ops
from strop.data import Demonstration, build_batch, demonstration_batch
from strop.types import Prompt, Rollout

seeded = settings(derandomize=True, deadline=None, max_examples=60)


def rollout(row, sample, prompt, response, *, mask=None):
    before, after = len(prompt), len(response)
    return Rollout(
        prompt=Prompt(row=row, tokens=tuple(prompt), text=""),
        group_id=row + 100,
        sample=sample,
        tokens=(*prompt, *response),
        response_mask=(False,) * before + (tuple(mask) if mask else (True,) * after),
        rollout_logprobs=(0.0,) * before + tuple(-0.25 * (i + 1) for i in range(after)),
        policy_versions=(-1,) * before + (0,) * after,
        finish_reason="stop",
        text="",
    )


ROLLOUTS = [
    rollout(3, 0, [5, 6], [9, 2]),
    rollout(3, 1, [5, 6], [7]),
    rollout(8, 0, [4], [1, 2, 3], mask=[True, False, True]),
]


def batch():
    return build_batch(ROLLOUTS, [0.5, -1.0, 2.0])


def test_every_field_stands_beside_its_token():
    b, T, F = batch(), True, False
    assert b.tokens.tolist() ==           [5,   6,   9,    2,    5,   6,   7,    4,   1,    2,   3]  # fmt: skip
    assert b.sequence_ids.tolist() ==     [0,   0,   0,    0,    1,   1,   1,    2,   2,    2,   2]  # fmt: skip
    assert b.group_ids.tolist() ==        [103, 103, 103,  103,  103, 103, 103,  108, 108,  108, 108]  # fmt: skip
    assert b.loss_mask.tolist() ==        [F,   F,   T,    T,    F,   F,   T,    F,   T,    F,   T]  # fmt: skip
    assert b.advantages.tolist() ==       [0.5, 0.5, 0.5,  0.5, -1.0, -1.0, -1.0, 2.0, 2.0, 2.0, 2.0]  # fmt: skip
    logprobs =                            [0.0, 0.0, -.25, -.5,  0.0, 0.0, -.25, 0.0, -.25, -.5, -.75]  # fmt: skip
    assert b.rollout_logprobs.tolist() == logprobs
    assert b.token_weights.tolist() == [0.0] * 11
    assert b.names == ("sample 0 of prompt row 3", "sample 1 of prompt row 3", "sample 0 of prompt row 8")


def test_types_are_what_the_trainer_computes_with():
    b = batch()
    assert (b.tokens.dtype, b.sequence_ids.dtype, b.group_ids.dtype) == (torch.int64,) * 3
    assert (b.loss_mask.dtype, b.token_weights.dtype) == (torch.bool, torch.float64)
    assert (b.rollout_logprobs.dtype, b.advantages.dtype) == (torch.float32,) * 2
    assert b.old_logprobs is None
    assert b.ref_logprobs is None


def test_counts_lengths_and_starts():
    b = batch()
    assert (b.num_sequences, b.num_trainable_tokens) == (3, 5)
    assert b.lengths == [4, 3, 4]
    assert b.starts == [0, 4, 7]


def test_the_first_token_of_a_sequence_is_never_trainable():
    # nothing predicts it: masked [T, T] without a prompt leaves one trainable token
    b = build_batch([rollout(0, 0, [], [5, 6])], [1.0])
    assert b.loss_mask.tolist() == [False, True]


def test_an_empty_response_has_no_trainable_token():
    b = build_batch([rollout(0, 0, [5, 6], []), rollout(0, 1, [5, 6], [7])], [9.0, 1.0])
    assert b.loss_mask.tolist() == [False, False, False, False, True]
    assert b.lengths == [2, 3]


def test_no_rollouts_are_an_empty_batch():
    b = build_batch([], [])
    assert (b.num_sequences, b.num_trainable_tokens, b.tokens.numel()) == (0, 0, 0)
    assert b.select([]).num_sequences == 0


def test_an_advantage_too_few_or_too_many_is_refused():
    for advantages in ([0.5, -1.0], [0.5, -1.0, 2.0, 3.0]):
        with pytest.raises((ValueError, RuntimeError)):
            build_batch(ROLLOUTS, advantages)


# ---- cutting ---------------------------------------------------------------------------------------------------------


def weighted_batch():
    b = batch()
    weights = ops.token_weights(b.loss_mask, b.sequence_ids, reduction="sequence_mean")
    return replace(b, token_weights=weights, old_logprobs=torch.arange(11.0), ref_logprobs=-torch.arange(11.0))


def test_selected_sequences_keep_the_weights_of_the_whole_in_the_order_given():
    # three sequences with 2, 1 and 2 trainable tokens: 1/6 1/6 | 1/3 | 1/6 1/6
    part = weighted_batch().select([2, 0])
    assert part.tokens.tolist() == [4, 1, 2, 3, 5, 6, 9, 2]
    assert part.token_weights.tolist() == pytest.approx([0, 1 / 6, 0, 1 / 6, 0, 0, 1 / 6, 1 / 6], abs=1e-12)
    assert part.sequence_ids.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert part.group_ids.tolist() == [108] * 4 + [103] * 4
    assert part.old_logprobs.tolist() == [7, 8, 9, 10, 0, 1, 2, 3]
    assert part.ref_logprobs.tolist() == [-7, -8, -9, -10, 0, -1, -2, -3]
    assert part.names == ("sample 0 of prompt row 8", "sample 0 of prompt row 3")
    assert (part.lengths, part.starts) == ([4, 4], [0, 4])


def test_a_selection_of_a_selection_is_the_selection_of_both():
    part = weighted_batch().select([2, 0]).select([1])
    assert part.tokens.tolist() == [5, 6, 9, 2]
    assert part.sequence_ids.tolist() == [0, 0, 0, 0]


@seeded
@given(st.permutations(range(3)), st.integers(0, 3))
def test_parts_of_any_cut_hold_every_token_and_weight_once(order, cut):
    whole = weighted_batch()
    parts = [whole.select(order[:cut]), whole.select(order[cut:])]
    assert sum(p.num_trainable_tokens for p in parts) == 5
    assert sum(p.token_weights.sum().item() for p in parts) == pytest.approx(1.0, abs=1e-12)
    places = torch.cat([whole.positions(order[:cut]), whole.positions(order[cut:])])
    assert sorted(places.tolist()) == list(range(11))
    assert torch.equal(whole.tokens[places], torch.cat([p.tokens for p in parts]))


def test_positions_are_those_of_the_flat_batch():
    assert batch().positions([1, 0]).tolist() == [4, 5, 6, 0, 1, 2, 3]


def test_moving_to_a_device_turns_the_weights_to_float32_and_keeps_the_rest():
    moved = weighted_batch().to(torch.device("cpu"))
    assert moved.token_weights.dtype == torch.float32
    assert moved.tokens.tolist() == batch().tokens.tolist()
    assert moved.old_logprobs.tolist() == list(range(11))


# ---- demonstrations --------------------------------------------------------------------------------------------------


def test_a_demonstration_is_learned_on_its_response_alone():
    b = demonstration_batch(
        [
            Demonstration(row=6, tokens=(5, 6, 9, 2), response_mask=(False, False, True, True)),
            Demonstration(row=7, tokens=(4, 2), response_mask=(False, True)),
        ]
    )
    assert b.tokens.tolist() == [5, 6, 9, 2, 4, 2]
    assert b.loss_mask.tolist() == [False, False, True, True, False, True]
    assert b.advantages.tolist() == [1.0] * 6
    assert b.sequence_ids.tolist() == b.group_ids.tolist() == [0, 0, 0, 0, 1, 1]
    assert b.rollout_logprobs.tolist() == [0.0] * 6
    assert b.names == ("demonstration row 6", "demonstration row 7")


def test_a_demonstration_without_a_prompt_is_learned_from_its_second_token():
    b = demonstration_batch([Demonstration(row=0, tokens=(5, 6, 2), response_mask=(True, True, True))])
    assert b.loss_mask.tolist() == [False, True, True]
