"""Products by the better library: those of torch, with the same gradients, and only where they are asked for."""

import subprocess
import sys

import pytest
import torch

from strop import products
from strop.products import Linear, linear, use_better_library

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture(params=[True, False], ids=["better", "plain"])
def is_better(request, monkeypatch):
    """A processor on which the other library is faster, or not; the products that went through it."""
    monkeypatch.setattr(products, "has_better_library", lambda: request.param)
    monkeypatch.setattr(products, "LEAST_WORK", 2000)
    monkeypatch.setattr(products, "LEAST_WORK_TO_LEARN", 2000)
    return request.param


@pytest.fixture
def calls(monkeypatch):
    """Shapes of what went through oneDNN."""
    found, plain = [], products._product

    def counted(x, weight, bias=None):
        found.append((tuple(x.shape), tuple(weight.shape)))
        return plain(x, weight, bias)

    monkeypatch.setattr(products, "_product", counted)
    return found


def drawn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype).requires_grad_()


@pytest.mark.parametrize("shape", [(40,), (3, 40), (2, 3, 20)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_and_gradients_are_those_of_torch(is_better, calls, shape, has_bias):
    x, weight, bias = drawn(*shape, 16), drawn(24, 16), drawn(24) if has_bias else None
    leaves = [leaf for leaf in (x, weight, bias) if leaf is not None]
    wanted, found = torch.nn.functional.linear(x, weight, bias), linear(x, weight, bias)
    torch.testing.assert_close(found, wanted)
    upstream = drawn(*wanted.shape).detach()
    gradients = [torch.autograd.grad((y * upstream).sum(), leaves) for y in (found, wanted)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert len(calls) == (3 if is_better else 0)  # one forward and two backward


def test_what_is_laid_out_otherwise_in_memory(is_better, calls):
    x, weight = drawn(16, 50), drawn(60, 16)
    for left, right in ((x.T, weight), (x.T[::2], weight[5:45]), (x.T[:, ::2], weight[:, ::2]), (x.T, drawn(16, 60).T)):
        torch.testing.assert_close(linear(left, right), torch.nn.functional.linear(left, right))
    with torch.inference_mode():
        torch.testing.assert_close(linear(x.T, weight), torch.nn.functional.linear(x.T, weight))
    assert len(calls) == (5 if is_better else 0)


def test_gradients_that_nobody_needs_are_not_computed(calls, monkeypatch):
    monkeypatch.setattr(products, "has_better_library", lambda: True)
    monkeypatch.setattr(products, "LEAST_WORK_TO_LEARN", 0)
    x, weight, bias = drawn(30, 16), drawn(24, 16).detach(), drawn(24).detach()
    (found,) = torch.autograd.grad(linear(x, weight, bias).sum(), x)
    torch.testing.assert_close(found, weight.sum(0).expand(30, 16))
    assert len(calls) == 2
    assert not linear(x.detach(), weight).requires_grad


def test_a_sum_has_a_gradient_that_is_one_number_in_memory(is_better):
    x, weight = drawn(100, 16), drawn(24, 16)
    linear(x, weight).sum().backward()
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(24, 16), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("other", ["small", "bfloat16", "meta", "off", "mixed"])
def test_others_are_left_to_torch(is_better, calls, other, monkeypatch):
    x, weight = drawn(40, 16), drawn(24, 16)
    if other == "small":
        x = drawn(4, 16)
    elif other == "bfloat16":
        x, weight = x.bfloat16(), weight.bfloat16()
    elif other == "meta":
        x, weight = x.to("meta"), weight.to("meta")
    elif other == "mixed":
        with pytest.raises(RuntimeError, match="dtype"):  # torch's own words
            linear(x, weight.double())
        return
    elif other == "off":
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert linear(x, weight).shape == (len(x), 24)
    assert not calls


def test_a_broken_token_leaves_the_others_alone(is_better):
    x, weight = drawn(100, 16).detach(), drawn(24, 16)
    whole = linear(x, weight)
    x[7] = torch.nan
    found = linear(x, weight)
    assert found[7].isnan().all()
    torch.testing.assert_close(found[torch.arange(100) != 7], whole[torch.arange(100) != 7])


def test_a_model_keeps_its_weights_and_the_classes_of_others(is_better, calls):
    class Mine(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Sequential(Mine(24, 8), torch.nn.ReLU()))
    weights, before = list(model.parameters()), model(drawn(50, 16))
    use_better_library(model)
    assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))
    assert [type(m) for m in model.modules() if isinstance(m, torch.nn.Linear)] == [
        Linear if is_better else torch.nn.Linear,
        Mine,
    ]
    torch.testing.assert_close(model(drawn(50, 16)), before)
    assert len(calls) == is_better


def test_what_learns_must_save_more(is_better, calls, monkeypatch):
    monkeypatch.setattr(products, "LEAST_WORK_TO_LEARN", 100_000)
    x, weight = drawn(100, 16), drawn(24, 16)
    linear(x, weight)
    assert not calls
    with torch.no_grad():
        linear(x, weight)
    assert len(calls) == is_better


MANY_SHAPES = """
import torch
from strop import products

products.has_better_library = lambda: True
x, weight = torch.randn(900, 256), torch.randn(256, 256)

def used():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) >> 10

with torch.no_grad():
    for rows in range(100, 120):
        products.linear(x[:rows], weight)
    before = used()
    for rows in range(120, 900):
        products.linear(x[:rows], weight)
print(used() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is looked up in /proc")
def test_memory_stays_level_however_many_shapes_there_are():
    """780 of them; where all are kept, 500 MB and more."""
    found = subprocess.run([sys.executable, "-c", MANY_SHAPES], capture_output=True, text=True, check=True, timeout=300)
    assert int(found.stdout) < 150
