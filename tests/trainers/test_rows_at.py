"""Many responses share the last token of their prompt: their gradients are summed the same way each time, on any threads."""

import torch

from strop.trainers.forward import rows_at


def gradient_of(rows, places, weights):
    rows = rows.clone().requires_grad_()
    (rows_at(rows, places) * weights).sum().backward()
    return rows.grad


def test_the_gradient_of_a_place_that_is_used_often_is_the_same_each_time_on_two_threads():
    generator = torch.Generator().manual_seed(0)
    rows, weights = (torch.randn(n, 32, generator=generator) for n in (64, 8192))
    places = torch.arange(8192) % 3
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        found = [gradient_of(rows, places, weights) for _ in range(30)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found)
    wanted = torch.zeros(64, 32, dtype=torch.float64).index_add_(0, places, weights.double())
    assert torch.allclose(found[0].double(), wanted, atol=1e-3)
