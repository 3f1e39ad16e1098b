"""slime's two losses, by numbers worked out by hand: ppo_kl is old - new, so the ratio is exp(-ppo_kl)."""

import subprocess
import sys
from math import log
from pathlib import Path

import pytest
import torch

from strop.compat.slime import compute_cispo_loss, compute_policy_loss

ROOT = Path(__file__).parents[2]


def ppo_kl_of(*ratios):
    return torch.tensor([-log(ratio) for ratio in ratios], dtype=torch.float64, requires_grad=True)


def test_the_policy_loss_is_the_larger_of_the_plain_and_the_clipped_surrogate():
    ppo_kl, advantages = ppo_kl_of(2.0, 0.5, 2.0, 0.5, 1.1), torch.tensor([1.0, 1.0, -2.0, -2.0, 3.0]).double()
    loss, clipped = compute_policy_loss(ppo_kl, advantages, 0.2, 0.28)
    # -1 * 1.28 (held);  -1 * 0.5 (plain);  2 * 2 (plain);  2 * 0.8 (held);  -3 * 1.1 (inside)
    assert loss.tolist() == pytest.approx([-1.28, -0.5, 4.0, 1.6, -3.3])
    assert clipped.tolist() == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert clipped.mean().item() == pytest.approx(0.4)


def test_dual_clip_caps_the_loss_of_a_negative_advantage_and_cuts_its_gradient():
    """Where it all began: a cap that is handed to the loss and acts."""
    ppo_kl, advantages = ppo_kl_of(5.0, 5.0, 2.0), torch.tensor([-1.0, 1.0, -1.0]).double()
    plain, _ = compute_policy_loss(ppo_kl, advantages, 0.2, 0.2)
    capped, clipped = compute_policy_loss(ppo_kl, advantages, 0.2, 0.2, 3.0)
    assert plain.tolist() == pytest.approx([5.0, -1.2, 2.0])
    assert capped.tolist() == pytest.approx([3.0, -1.2, 2.0])  # 5 is cut to eps_clip_c; the others are as they were
    assert clipped.tolist() == [0.0, 1.0, 0.0]
    capped.sum().backward()
    # d loss / d ppo_kl = A r where the plain branch decides: 0 under the cap, 0 where held, -1 * 2 for the last
    assert ppo_kl.grad.tolist() == pytest.approx([0.0, 0.0, -2.0])


@pytest.mark.parametrize("cap", [1.0, 0.5])
def test_a_cap_that_would_cut_on_policy_tokens_is_refused(cap):
    with pytest.raises(ValueError, match="eps_clip_c must be > 1"):
        compute_policy_loss(ppo_kl_of(1.0), torch.ones(1), 0.2, 0.2, cap)


def test_cispo_weighs_log_probs_by_the_clipped_ratio_and_says_where_it_cut():
    ppo_kl, advantages = ppo_kl_of(6.0, 1.5, 0.1, 5.0), torch.tensor([1.0, -1.0, 2.0, 1.0]).double()
    log_probs = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64, requires_grad=True)
    loss, clipped = compute_cispo_loss(ppo_kl, log_probs, advantages, 1.0, 3.5)
    # -4.5 * 1 * -1;  -1.5 * -1 * -2;  -0.1 * 2 * -0.5;  -4.5 * 1 * -3
    assert loss.tolist() == pytest.approx([4.5, -3.0, 0.1, 13.5])
    assert clipped.tolist() == [1.0, 0.0, 0.0, 1.0]
    loss.sum().backward()
    assert log_probs.grad.tolist() == pytest.approx([-4.5, 1.5, -0.2, -4.5])  # -w A, under the clip too
    assert ppo_kl.grad is None or not ppo_kl.grad.any()


def test_cispo_has_a_lower_bound_where_eps_clip_is_below_1():
    loss, clipped = compute_cispo_loss(ppo_kl_of(0.1), torch.tensor([-1.0]), torch.tensor([1.0]), 0.2, 0.2)
    assert loss.tolist() == pytest.approx([0.8])
    assert clipped.tolist() == [1.0]


def test_float32_stays_float32_and_log_probs_far_from_0_lose_nothing():
    ppo_kl = torch.tensor([-1e-4, 0.0])
    loss, clipped = compute_cispo_loss(ppo_kl, torch.tensor([-1e4, -1e4]), torch.ones(2), 0.0, 0.0)
    assert loss.dtype == clipped.dtype == torch.float32
    assert clipped.tolist() == [1.0, 0.0]  # a ratio of 1.0001 is cut, one of 1 is not


def test_the_arguments_have_slime_s_names():
    one = torch.zeros(1)
    assert compute_policy_loss(ppo_kl=one, advantages=one, eps_clip=0.2, eps_clip_high=0.2, eps_clip_c=None)
    assert compute_cispo_loss(ppo_kl=one, log_probs=one, advantages=one, eps_clip=0.2, eps_clip_high=0.2)


ONE_FOR_ALL = {
    "a number": 2.0,
    "of no dimension": torch.tensor(2.0),
    "of length 1": torch.tensor([2.0]),
    "one for each row": torch.tensor([[2.0], [-1.0]]),
}


@pytest.mark.parametrize("advantages", ONE_FOR_ALL.values(), ids=ONE_FOR_ALL)
def test_advantages_are_broadcast_to_the_tokens_as_in_slime(advantages):
    ppo_kl = -torch.tensor([[2.0, 0.5], [1.0, 4.0]]).log()
    below = -1.0 if isinstance(advantages, torch.Tensor) and advantages.dim() == 2 else 2.0
    loss, clipped = compute_policy_loss(ppo_kl, advantages, 0.2, 0.2, 3.0)
    # first row, A = 2: -2 * 1.2 (held), -2 * 0.5;  second row, A = 2: -2, -2 * 1.2 (held), or A = -1: 1, 3 (capped)
    second = [-2.0, -2.4] if below == 2 else [1.0, 3.0]
    assert loss.tolist() == [pytest.approx([-2.4, -1.0]), pytest.approx(second)]
    assert clipped.tolist() == [[1.0, 0.0], [0.0, 1.0 if below == 2 else 0.0]]
    loss, _ = compute_cispo_loss(ppo_kl, torch.full((2, 2), -1.0), advantages, 1.0, 1.0)
    # -w A log pi = w A with w cut at 2
    assert loss.tolist() == [pytest.approx([4.0, 1.0]), pytest.approx([1.0 * below, 2.0 * below])]


def test_advantages_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="shape"):
        compute_policy_loss(torch.zeros(4), torch.ones(3), 0.2, 0.2)


def test_bfloat16_gives_float32():
    ppo_kl = torch.zeros(2, dtype=torch.bfloat16)
    assert compute_policy_loss(ppo_kl, ppo_kl, 0.2, 0.2)[0].dtype == torch.float32
    assert compute_cispo_loss(ppo_kl, ppo_kl, ppo_kl, 0.2, 0.2)[0].dtype == torch.float32


def test_they_need_nothing_but_torch():
    program = """
import sys, torch
before = set(sys.modules)
from strop.compat.slime import compute_policy_loss
print({name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "{'strop'}", done.stderr
