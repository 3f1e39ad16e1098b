"""Log-probabilities straight from hidden states: equal to the plain way, in chunks that never hold all logits."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strop.ops import linear_logprobs, logits_entropy, token_logprobs

F64 = torch.float64


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return result


def inputs(num_tokens, hidden_size=8, vocab=11, dtype=F64):
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator, dtype=F64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, hidden_size, generator=generator, dtype=F64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(vocab, (num_tokens,), generator=generator)


def combine(logprobs, entropy, num_tokens):
    """A scalar that gives every token another gradient, and entropy another one than the log-probability."""
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(num_tokens, generator=generator, dtype=F64).to(logprobs.dtype)
    b = torch.randn(num_tokens, generator=generator, dtype=F64).to(logprobs.dtype)
    return (a * logprobs).sum() + (0 if entropy is None else (b * entropy).sum())


def test_by_hand():
    # logits [1, 0]: ln sigmoid(1) = -.313262; [0, 1] asked for 0: ln sigmoid(-1) = -1.313262
    # entropy of both: p = sigmoid(1) = .731059: .731059 * .313262 + .268941 * 1.313262 = .229013 + .353191 = .582203
    found = linear_logprobs(torch.eye(2), torch.eye(2), torch.tensor([0, 0]), with_entropy=True)
    assert found.logprobs.tolist() == pytest.approx([-0.313262, -1.313262], abs=1e-6)
    assert found.entropy.tolist() == pytest.approx([0.582203, 0.582203], abs=2e-6)


# 1024 rows are held at once: none, one, one short of a chunk, a chunk, one more, two chunks and a rest
@pytest.mark.parametrize("num_tokens", [0, 1, 1023, 1024, 1025, 2100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_equal_the_plain_way(num_tokens, temperature, with_entropy):
    hidden, weight, targets = inputs(num_tokens)
    logits = hidden @ weight.T
    plain = token_logprobs(logits, targets, temperature=temperature)
    plain_entropy = logits_entropy(logits, temperature=temperature) if with_entropy else None
    expected = torch.autograd.grad(combine(plain, plain_entropy, num_tokens), (hidden, weight))
    found = linear_logprobs(hidden, weight, targets, temperature=temperature, with_entropy=with_entropy)
    gradients = torch.autograd.grad(combine(*found, num_tokens), (hidden, weight))
    # float64: 2100 products of order 10 are summed into the weight's gradient in another order
    assert torch.allclose(found.logprobs, plain, rtol=0, atol=1e-12)
    assert (found.entropy is None) == (not with_entropy)
    if with_entropy:
        assert torch.allclose(found.entropy, plain_entropy, rtol=0, atol=1e-12)
    for mine, theirs in zip(gradients, expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-11, atol=1e-11)


def test_a_bias_is_added_to_the_logits():
    hidden, weight, targets = inputs(300)
    bias = torch.randn(11, dtype=F64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    leaves, more = (hidden, weight, bias), {"temperature": 0.7}
    logits = hidden @ weight.T + bias
    plain = token_logprobs(logits, targets, **more), logits_entropy(logits, **more)
    expected = torch.autograd.grad(combine(*plain, 300), leaves)
    found = linear_logprobs(hidden, weight, targets, bias=bias, with_entropy=True, **more)
    for mine, theirs in zip(found, plain, strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)
    for mine, theirs in zip(torch.autograd.grad(combine(*found, 300), leaves), expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-11, atol=1e-11)
    with pytest.raises(ValueError, match=r"bias must have an entry for each of weight's 11 rows, got \(10,\)"):
        linear_logprobs(hidden, weight, targets, bias=bias[1:])


@pytest.mark.parametrize("of", ["logprobs", "entropy"])
def test_gradient_of_one_result_alone(of):
    hidden, weight, targets = inputs(300)
    plain = token_logprobs(hidden @ weight.T, targets) if of == "logprobs" else logits_entropy(hidden @ weight.T)
    expected = torch.autograd.grad(plain.square().sum(), (hidden, weight))
    found = getattr(linear_logprobs(hidden, weight, targets, with_entropy=True), of)
    for mine, theirs in zip(torch.autograd.grad(found.square().sum(), (hidden, weight)), expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradcheck(with_entropy, monkeypatch):
    monkeypatch.setattr("strop.ops.logprobs.CHUNK_TOKENS", 2)  # 5 tokens: two chunks and a rest
    monkeypatch.setattr("strop.ops.logprobs.CHUNK_IDS", 3)  # and of 4 ids one
    hidden, weight, targets = inputs(5, hidden_size=3, vocab=4)

    def call(h, w):
        found = linear_logprobs(h, w, targets, temperature=0.8, with_entropy=with_entropy)
        return found if with_entropy else found.logprobs

    assert torch.autograd.gradcheck(call, (hidden, weight))


@pytest.mark.parametrize("chunk", [1, 3, 64, 10_000])
@pytest.mark.parametrize("ids", [1, 4, 10, 10_000])
def test_the_size_of_a_chunk_does_not_matter(chunk, ids, monkeypatch):
    hidden, weight, targets = inputs(70)
    before = linear_logprobs(hidden, weight, targets, with_entropy=True)
    expected = torch.autograd.grad(combine(*before, 70), (hidden, weight))
    monkeypatch.setattr("strop.ops.logprobs.CHUNK_TOKENS", chunk)
    monkeypatch.setattr("strop.ops.logprobs.CHUNK_IDS", ids)
    after = linear_logprobs(hidden, weight, targets, with_entropy=True)
    assert torch.allclose(after.logprobs, before.logprobs, rtol=0, atol=1e-12)
    for mine, theirs in zip(torch.autograd.grad(combine(*after, 70), (hidden, weight)), expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_all_logits_are_never_held_forward_or_backward(with_entropy):
    num_tokens, vocab = 2048, 6000
    hidden, weight, targets = inputs(num_tokens, hidden_size=4, vocab=vocab, dtype=torch.float32)
    with LargestTensor() as largest:
        combine(*linear_logprobs(hidden, weight, targets, with_entropy=with_entropy), num_tokens).backward()
    assert largest.numel <= 1024 * 4096  # one chunk of logits; all of them would be 3 times as many
    with LargestTensor() as plain:
        token_logprobs(hidden @ weight.T, targets)
    assert plain.numel == num_tokens * vocab  # the recorder does see what the plain way makes


def test_one_tensor_may_lack_gradient():
    hidden, weight, targets = inputs(5)
    linear_logprobs(hidden, weight.detach(), targets).logprobs.sum().backward()
    assert hidden.grad is not None
    linear_logprobs(hidden.detach(), weight, targets).logprobs.sum().backward()
    assert weight.grad is not None
    assert not linear_logprobs(hidden.detach(), weight.detach(), targets).logprobs.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_reduced_in_float32(dtype):
    # one-hot rows of weight: each logit is one product, exact in both; what remains is the softmax, in float32
    hidden, _, _ = inputs(6, hidden_size=5, dtype=dtype)
    targets = torch.tensor([0, 1, 2, 3, 4, 0])
    found = linear_logprobs(hidden, torch.eye(5, dtype=dtype), targets, with_entropy=True)
    plain = token_logprobs(hidden.double(), targets)
    assert found.logprobs.dtype == found.entropy.dtype == torch.float32
    assert torch.allclose(found.logprobs.double(), plain, rtol=0, atol=1e-6)


def test_weight_gradient_in_bfloat16_does_not_drown_in_many_chunks():
    # 200 chunks of the same tokens: the sum grows to 200 times each part, and bfloat16 has 8 bits. Accumulated in
    # float32 and rounded once, as one matrix product does it, the error is about 2^-9 = .2 per cent of the largest entry.
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(256, 4, generator=generator).bfloat16().repeat(200, 1)
    targets = torch.randint(3, (256,), generator=generator).repeat(200)
    weight = torch.randn(3, 4, generator=generator).bfloat16().requires_grad_()
    exact = weight.detach().double().requires_grad_()
    token_logprobs(hidden.double() @ exact.T, targets).sum().backward()
    linear_logprobs(hidden, weight, targets).logprobs.sum().backward()
    assert (weight.grad.double() - exact.grad).abs().max() < 0.01 * exact.grad.abs().max()


def test_arguments_are_left_as_they_were():
    hidden, weight, targets = inputs(5)
    before = hidden.detach().clone(), weight.detach().clone()
    linear_logprobs(hidden, weight, targets, temperature=0.5, with_entropy=True).logprobs.sum().backward()
    assert torch.equal(hidden, before[0])
    assert torch.equal(weight, before[1])


@pytest.mark.parametrize(
    "hidden, weight, targets",
    [
        ((5, 3), (7, 3), (4,)),  # one target too few
        ((5, 3), (7, 2), (5,)),  # widths differ
        ((1, 5, 3), (7, 3), (1, 5)),  # rows are not flat
        ((2, 3, 3), (7, 3), (2,)),
        ((5, 3), (3,), (5,)),  # the head is a vector
        ((5, 3), (7, 3), (5, 1)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(hidden, weight, targets):
    with pytest.raises(ValueError, match="hidden must be T x H"):
        linear_logprobs(torch.zeros(hidden), torch.zeros(weight), torch.zeros(targets, dtype=torch.long))


@pytest.mark.parametrize("target", [-1, 11])
def test_a_target_that_is_no_id_is_refused(target):
    hidden, weight, targets = inputs(5)
    targets[3] = target
    with pytest.raises(ValueError, match=f"targets must be ids from 0 to 10, got .*{target}"):
        linear_logprobs(hidden, weight, targets)


def test_extreme_logits_in_float32(monkeypatch):
    """Differences first, also over chunks: logsumexp of 1e4 has steps of .001."""
    hidden, weight, targets = inputs(40)
    bias = torch.full((11,), -1e4, dtype=F64)
    exact = token_logprobs(hidden @ weight.T + bias, targets)
    monkeypatch.setattr("strop.ops.logprobs.CHUNK_IDS", 3)
    found = linear_logprobs(hidden.float(), weight.float(), targets, bias=bias.float())
    assert torch.allclose(found.logprobs.double(), exact, rtol=0, atol=5e-3)  # the logits themselves have steps of .001
    loud = linear_logprobs(hidden.float() * 1e4, weight.float(), targets, with_entropy=True)
    assert torch.allclose(loud.logprobs.double(), token_logprobs(hidden * 1e4 @ weight.T, targets), rtol=1e-5, atol=0.1)
    assert loud.entropy.isfinite().all()
    assert (loud.entropy >= 0).all()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature must be > 0"):
        linear_logprobs(torch.zeros(1, 1), torch.zeros(2, 1), torch.tensor([0]), temperature=temperature)
