"""Log-probabilities and entropies from logits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.ops import logits_entropy, token_logprobs

F64 = torch.float64
seeded = settings(derandomize=True, deadline=None, max_examples=60)
rows = st.lists(st.floats(-20, 20), min_size=2, max_size=6)
temperatures = st.sampled_from([0.3, 1.0, 2.5])


def slow_distribution(row, temperature):
    """Probabilities with plain exponentials: exp(20 / .3) = 9e28 is far from overflow in float64."""
    unnormalised = [math.exp(x / temperature) for x in row]
    total = math.fsum(unnormalised)
    return [u / total for u in unnormalised]


def test_logprobs_by_hand():
    # a bigram model with rows [.7,.2,.1], [.1,.6,.3], [.25,.25,.5] on response 2, 2, 0 after 1: ln .3, ln .5, ln .25
    table = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]], dtype=F64).log()
    logprobs = token_logprobs(table[[1, 2, 2]], torch.tensor([2, 2, 0]))
    assert logprobs.tolist() == pytest.approx([-1.203973, -0.693147, -1.386294], abs=1e-6)


def test_temperature_by_hand():
    # logits [2, 0] at temperature 2 are [1, 0]: ln sigmoid(1) = -.313262, ln sigmoid(-1) = -1.313262
    logits = torch.tensor([[2.0, 0.0]] * 2, dtype=F64)
    logprobs = token_logprobs(logits, torch.tensor([0, 1]), temperature=2.0)
    assert logprobs.tolist() == pytest.approx([-0.313262, -1.313262], abs=1e-6)


def test_entropy_by_hand():
    # ln 4 for four equal; -(.5 ln .5 + 2 * .25 ln .25) = .346574 + .693147 = 1.039721; 0 for a certain choice
    assert logits_entropy(torch.zeros(4, dtype=F64)).item() == pytest.approx(1.386294, abs=1e-6)
    half = torch.tensor([0.5, 0.25, 0.25], dtype=F64).log() + 3.0
    assert logits_entropy(half).item() == pytest.approx(1.039721, abs=1e-6)
    assert logits_entropy(torch.tensor([100.0, 0.0, 0.0], dtype=F64)).item() == pytest.approx(0.0, abs=1e-12)


@seeded
@given(rows, temperatures)
def test_both_equal_the_slow_reference(row, temperature):
    p = slow_distribution(row, temperature)
    logits = torch.tensor([row] * len(row), dtype=F64)
    logprobs = token_logprobs(logits, torch.arange(len(row)), temperature=temperature)
    assert logprobs.exp().tolist() == pytest.approx(p, rel=1e-9, abs=1e-300)
    entropy = -math.fsum(x * math.log(x) for x in p if x > 0)
    assert logits_entropy(logits[0], temperature=temperature).item() == pytest.approx(entropy, rel=1e-9, abs=1e-12)


@seeded
@given(rows, temperatures, st.data())
def test_gradient_of_a_logprob_is_one_hot_minus_probabilities_over_temperature(row, temperature, data):
    target = data.draw(st.integers(0, len(row) - 1))
    logits = torch.tensor(row, dtype=F64, requires_grad=True)
    token_logprobs(logits, torch.tensor(target), temperature=temperature).backward()
    p = slow_distribution(row, temperature)
    expected = [((v == target) - p[v]) / temperature for v in range(len(row))]
    assert logits.grad.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_gradchecks():
    torch.manual_seed(0)
    logits = torch.randn(3, 2, 5, dtype=F64, requires_grad=True)
    targets = torch.randint(5, (3, 2))
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, targets, temperature=0.7), (logits,))
    assert torch.autograd.gradcheck(lambda x: logits_entropy(x, temperature=0.7), (logits,))


@seeded
@given(rows, st.floats(-1e3, 1e3))
def test_a_shift_of_all_logits_changes_nothing(row, shift):
    logits = torch.tensor([row], dtype=F64)
    target = torch.tensor([0])
    # a shift of 1e3 costs 1e3 * 2^-52 = 2e-13 in the logits
    assert token_logprobs(logits + shift, target).item() == pytest.approx(
        token_logprobs(logits, target).item(), abs=1e-11
    )
    assert logits_entropy(logits + shift).item() == pytest.approx(logits_entropy(logits).item(), abs=1e-11)


def test_large_logits_stay_finite_in_float32():
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    logprobs = token_logprobs(logits, torch.tensor([1]))
    assert logprobs.item() == pytest.approx(-2e4)
    (logprobs.sum() + logits_entropy(logits).sum()).backward()
    assert logits.grad.isfinite().all()


def test_a_token_that_was_ruled_out_has_no_share_in_the_entropy():
    # logits [0, 0, -inf]: two equal choices, ln 2; the gradient stays finite
    logits = torch.tensor([0.0, 0.0, -math.inf], requires_grad=True)
    entropy = logits_entropy(logits)
    assert entropy.item() == pytest.approx(math.log(2), abs=1e-6)
    entropy.backward()
    assert logits.grad.isfinite().all()
    assert token_logprobs(logits.detach(), torch.tensor(0)).item() == pytest.approx(-math.log(2), abs=1e-6)
    assert token_logprobs(logits.detach(), torch.tensor(2)).item() == -math.inf


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    torch.manual_seed(0)
    logits, targets = torch.randn(4, 300).to(dtype), torch.randint(300, (4,))
    assert token_logprobs(logits, targets).dtype == torch.float32
    assert torch.equal(token_logprobs(logits, targets), token_logprobs(logits.float(), targets))
    assert logits_entropy(logits).dtype == torch.float32
    assert torch.equal(logits_entropy(logits), logits_entropy(logits.float()))


def test_float64_stays_float64():
    assert token_logprobs(torch.zeros(1, 2, dtype=F64), torch.tensor([0])).dtype == F64
    assert logits_entropy(torch.zeros(1, 2, dtype=F64)).dtype == F64


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (2, 3)])
def test_any_leading_shape_is_kept(shape):
    logits, targets = torch.zeros(*shape, 7), torch.zeros(shape, dtype=torch.long)
    assert token_logprobs(logits, targets).shape == shape
    assert logits_entropy(logits).shape == shape


def test_arguments_are_left_as_they_were():
    logits = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    token_logprobs(logits, torch.tensor([0, 1]), temperature=0.5)
    logits_entropy(logits, temperature=0.5)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature must be > 0"):
        token_logprobs(torch.zeros(1, 2), torch.tensor([0]), temperature=temperature)
    with pytest.raises(ValueError, match="temperature must be > 0"):
        logits_entropy(torch.zeros(2), temperature=temperature)


@pytest.mark.parametrize("targets", [(2,), (3, 1), ()])
def test_targets_of_another_shape_are_refused(targets):
    with pytest.raises(ValueError, match="must be targets' shape x V"):
        token_logprobs(torch.zeros(3, 5), torch.zeros(targets, dtype=torch.long))
