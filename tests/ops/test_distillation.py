"""A teacher's signal per token: values by hand, a slow reference in plain Python, limits, and masks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.ops import distillation_advantages

# Two sequences; the third token of the first is a tool's and masked.
OLD = torch.tensor([-1.0, -2.0, math.nan, -0.5, -3.0, -1.0], dtype=torch.float64)
TEACHER = torch.tensor([-1.5, -1.0, math.nan, -0.25, -1.0, -3.0], dtype=torch.float64)
MASK = torch.tensor([True, True, False, True, True, True])
IDS = torch.tensor([0, 0, 0, 0, 1, 1])


def test_a_token_answers_for_its_own_distance_by_default():
    """-1.5+1 = -.5, -1+2 = 1, masked, -.25+.5 = .25 | -1+3 = 2, -3+1 = -2; times 2."""
    found = distillation_advantages(OLD, TEACHER, MASK, IDS, coef=2.0, gamma=0.0)
    assert found.tolist() == [-1.0, 2.0, 0.0, 0.5, 4.0, -4.0]


def test_later_distances_count_by_their_discount_and_masked_tokens_are_no_steps():
    """d = [-.5, 1, -, .25 | 2, -2], gamma 1/2: -.5 + .5 x 1.125 = .0625; 1 + .5 x .25 = 1.125; .25 | 2 - 1 = 1; -2."""
    found = distillation_advantages(OLD, TEACHER, MASK, IDS, coef=1.0, gamma=0.5)
    assert found.tolist() == [0.0625, 1.125, 0.0, 0.25, 1.0, -2.0]


def test_with_gamma_1_the_first_token_answers_for_its_whole_sequence():
    """-.5 + 1 + .25 = .75 and 2 - 2 = 0."""
    found = distillation_advantages(OLD, TEACHER, MASK, IDS, coef=1.0, gamma=1.0)
    assert found[0] == 0.75
    assert found[4] == 0


def test_where_teacher_and_student_agree_there_is_no_signal():
    assert distillation_advantages(OLD, OLD, MASK, IDS, coef=3.0, gamma=1.0).eq(0).all()


def test_the_expected_gradient_on_fresh_samples_is_that_of_the_reverse_kl():
    """One token of three: E_p[(log q - log p) grad log p] by enumeration is minus the gradient of KL(p || q) by autograd."""
    logits = torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.1, 0.2, -0.5], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    (kl,) = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), logits, retain_graph=True)
    everything = torch.ones(3, dtype=torch.bool)
    signal = distillation_advantages(logprobs.detach(), teacher, everything, torch.arange(3), coef=1.0, gamma=0.0)
    (learned,) = torch.autograd.grad((logprobs.detach().exp() * signal * logprobs).sum(), logits)
    assert torch.allclose(learned, -kl, atol=1e-12)


def slow_reference(old, teacher, mask, ids, coef, gamma):
    found = []
    for t in range(len(old)):
        later = [s for s in range(t, len(old)) if ids[s] == ids[t] and mask[s]]
        found.append(coef * sum(gamma**n * (teacher[s] - old[s]) for n, s in enumerate(later)) if mask[t] else 0.0)
    return found


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    rows=st.lists(
        st.tuples(st.floats(-9, 0), st.floats(-9, 0), st.booleans(), st.integers(0, 2)), min_size=1, max_size=12
    ),
    coef=st.floats(0.01, 3),
    gamma=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
)
def test_it_is_what_a_slow_reference_gives_whatever_the_cut(rows, coef, gamma):
    rows.sort(key=lambda row: row[3])
    old, teacher, mask, ids = (list(column) for column in zip(*rows, strict=True))
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (old, teacher)] + [torch.tensor(mask), torch.tensor(ids)]
    found = distillation_advantages(*tensors, coef=coef, gamma=gamma)
    assert found.tolist() == pytest.approx(slow_reference(old, teacher, mask, ids, coef, gamma), abs=1e-12)
    for one in set(ids):  # each sequence alone
        alone = distillation_advantages(*(t[tensors[3] == one] for t in tensors), coef=coef, gamma=gamma)
        assert torch.equal(alone, found[tensors[3] == one])


def test_half_precision_is_computed_in_float32():
    found = distillation_advantages(OLD[:1].bfloat16(), TEACHER[:1].bfloat16(), MASK[:1], IDS[:1], coef=1.0, gamma=0.0)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("gamma", [-0.1, 1.1])
def test_a_discount_out_of_range_is_refused(gamma):
    with pytest.raises(ValueError, match="gamma must be in"):
        distillation_advantages(OLD, TEACHER, MASK, IDS, coef=1.0, gamma=gamma)


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"must share a shape, got \(6,\) and \(5,\)"):
        distillation_advantages(OLD, TEACHER[:5], MASK, IDS, coef=1.0, gamma=0.0)
