"""The policy losses as the trainer's real step computes them: values, gradients, and whether weights move."""

import math
from dataclasses import replace

import pytest
import tiny_models
import torch
from made_batches import make_batch, make_objective, make_trainer, parameters, same_tensors, seen_gradients

from strop.algorithms import LikelihoodObjective

PPO = {"kind": "ppo_clip", "eps_clip": 0.2, "eps_clip_c": 3.0}


def one_token_step(policy_loss, *, ratio, advantage, reference_gap=None, kl=0.0, **trainer_options):
    """A step on token 2 after token 1 (p = .3) at this ratio: metrics, gradients by the table's row 1, did it move."""
    model = tiny_models.bigram()
    batch = make_batch(([1], [2]), advantages=[advantage])
    current = torch.tensor([0.0, math.log(0.3)])
    batch = replace(batch, old_logprobs=current - torch.tensor([0.0, math.log(ratio)]))
    if reference_gap is not None:
        batch = replace(batch, ref_logprobs=current - torch.tensor([0.0, reference_gap]))
    trainer = make_trainer(model, lr=0.1, weight_decay=0.0, **trainer_options)
    before = parameters(model)
    with seen_gradients(model) as gradients:
        metrics = trainer.step(batch, make_objective(policy_loss=policy_loss, kl={"coef": kl}))
    return metrics, gradients["table"], not same_tensors(before, parameters(model))


# d logprob(2 | 1) / d logits of row 1 = [0, 0, 1] - p = [-.1, -.6, .7]
SLOPE = (-0.1, -0.6, 0.7)


def test_dual_clip_reaches_the_loss_and_stops_the_gradient():
    # case 1: r = 10, A = -1: max(10, 1.2) = 10 above the cap 3 x 1
    metrics, gradient, moved = one_token_step(PPO, ratio=10, advantage=-1.0)
    assert metrics["loss"].value == pytest.approx(3.0, abs=1e-5)
    assert metrics["dual_clip_fraction"].value == 1.0
    assert gradient.tolist() == [[0.0] * 3] * 3
    assert metrics["grad_norm"].value == 0.0
    assert not moved


def test_below_the_dual_clip_the_loss_is_the_ratio():
    # case 1: r = 2, A = -1: 2, below the cap; gradient -A r = 2 times the slope
    metrics, gradient, moved = one_token_step(PPO, ratio=2, advantage=-1.0)
    assert metrics["loss"].value == pytest.approx(2.0, abs=1e-5)
    assert metrics["dual_clip_fraction"].value == 0.0
    assert gradient[1].tolist() == pytest.approx([2 * x for x in SLOPE], abs=1e-5)
    assert moved


def test_a_positive_advantage_is_cut_by_the_band_and_never_by_the_cap():
    # case 1: r = 10, A = 1: -min(10, 1.2)
    metrics, gradient, moved = one_token_step(PPO, ratio=10, advantage=1.0)
    assert metrics["loss"].value == pytest.approx(-1.2, abs=1e-5)
    assert metrics["clip_fraction"].value == 1.0
    assert gradient.tolist() == [[0.0] * 3] * 3
    assert not moved


@pytest.mark.parametrize("ratio, weight, clipped", [(1.5, 1.28, 1.0), (1.1, 1.1, 0.0)])
def test_cispo_keeps_the_gradient_of_a_clipped_token(ratio, weight, clipped):
    # case 17: loss = -w A logprob, gradient -w A by the logprob
    cispo = {"kind": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.28}
    metrics, gradient, moved = one_token_step(cispo, ratio=ratio, advantage=1.0)
    assert metrics["loss"].value == pytest.approx(weight * 1.2039728, abs=1e-5)  # -ln .3 = 1.2039728
    assert metrics["clip_fraction"].value == clipped
    assert gradient[1].tolist() == pytest.approx([-weight * x for x in SLOPE], abs=1e-5)
    assert moved


def test_cispo_at_a_logprob_of_minus_one():
    # case 17 as it stands: logprob -1, r = 1.5, bound 1.28: loss 1.28, clipped
    rows = ((0.5, 0.3, 0.2), (0.5, 0.5 - math.exp(-1), math.exp(-1)), (0.2, 0.3, 0.5))
    batch = make_batch(([1], [2]))
    batch = replace(batch, old_logprobs=torch.tensor([0.0, -1.0 - math.log(1.5)]))
    objective = make_objective(policy_loss={"kind": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.28})
    metrics = make_trainer(tiny_models.bigram(rows)).step(batch, objective)
    assert metrics["loss"].value == pytest.approx(1.28, abs=1e-5)
    assert metrics["clip_fraction"].value == 1.0


def test_the_kl_pulls_where_the_policy_loss_is_cut():
    # k3 with d = ln 2: .193147 in value, 1 - 1/2 in gradient; times 0.4. The policy loss is -1.2 without gradient.
    metrics, gradient, moved = one_token_step(PPO, ratio=10, advantage=1.0, reference_gap=math.log(2), kl=0.4)
    assert metrics["loss"].value == pytest.approx(-1.2 + 0.0772589, abs=1e-5)
    assert gradient[1].tolist() == pytest.approx([0.2 * x for x in SLOPE], abs=1e-5)
    assert moved


def test_without_old_logprobs_every_ratio_is_one():
    model = tiny_models.bigram()
    with seen_gradients(model) as gradients:
        metrics = make_trainer(model).step(make_batch(([1], [2]), advantages=[0.5]), make_objective(policy_loss=PPO))
    assert metrics["loss"].value == pytest.approx(-0.5, abs=1e-7)
    assert metrics["ratio_max"].value == metrics["ratio_min"].value == 1.0
    assert metrics["clip_fraction"].value == 0.0
    assert gradients["table"][1].tolist() == pytest.approx([-0.5 * x for x in SLOPE], abs=1e-6)


def test_a_huge_ratio_is_finite_and_a_masked_one_absent():
    # case 14: logprobs [-1, -2], old [-1, -91]. Mask [1, 0]: the loss is -A, whatever the second token says.
    p = math.exp(-1), math.exp(-2)
    rows = ((1 - p[0] - 0.1, p[0], 0.1), (0.1, 0.9 - p[1], p[1]), (0.2, 0.3, 0.5))
    batch = replace(make_batch(([0], [1, 2])), old_logprobs=torch.tensor([0.0, -1.0, -91.0]))
    model = tiny_models.bigram(rows)
    with seen_gradients(model) as gradients:
        metrics = make_trainer(model).step(batch, make_objective(policy_loss=PPO))
    # A = 1: tokens -1 and -1.2, half each; only the first has gradient, by row 0
    assert metrics["loss"].value == pytest.approx(-1.1, abs=1e-5)
    assert gradients["table"][1].tolist() == [0.0, 0.0, 0.0]
    masked = replace(batch, loss_mask=torch.tensor([False, True, False]), token_weights=torch.tensor([0.0, 1.0, 0.0]))
    model = tiny_models.bigram(rows)
    with seen_gradients(model) as gradients:
        metrics = make_trainer(model).step(masked, make_objective(policy_loss=PPO))
    assert metrics["loss"].value == pytest.approx(-1.0, abs=1e-6)
    assert gradients["table"][1].tolist() == [0.0, 0.0, 0.0]


def test_the_entropy_bonus_flattens_the_row():
    # H = -sum p ln p for [.1, .6, .3] = .230259 + .306495 + .361192 = .897946; dH/dz_v = -p_v (ln p_v + H)
    model = tiny_models.bigram()
    batch = make_batch(([1], [2]), advantages=[0.0])
    with seen_gradients(model) as gradients:
        metrics = make_trainer(model).step(batch, make_objective(entropy_coef=0.1))
    assert metrics["loss"].value == pytest.approx(-0.0897946, abs=1e-6)
    # -.1 (-2.302585 + .897946) = .1404639;  -.6 (-.510826 + .897946) = -.2322723;  -.3 (-1.203973 + .897946) = .0918081
    slope = (0.1404639, -0.2322723, 0.0918081)
    assert gradients["table"][1].tolist() == pytest.approx([-0.1 * x for x in slope], abs=1e-6)


def test_temperature_divides_the_logits():
    # T = 2: square roots of [.1, .6, .3] = .316228, .774597, .547723, sum 1.638547; -.601986 - .493810
    model = tiny_models.bigram()
    objective = make_objective(temperature=2.0, policy_loss={"kind": "cispo"})
    metrics = make_trainer(model).step(make_batch(([1], [2])), objective)
    assert metrics["loss"].value == pytest.approx(1.095796, abs=1e-5)


class Watching(LikelihoodObjective):
    """Keeps the entropies that it is handed."""

    def __init__(self, *, measures_entropy):
        self.measures_entropy, self.seen = measures_entropy, []

    def loss(self, tokens):
        self.seen.append(tokens.entropy)
        return super().loss(tokens)


def test_an_objective_without_entropy_has_none_computed_and_learns_the_same():
    # fine-tuning shows no entropy; with a vocabulary of 49152 it took a third of the step
    weights = []
    for measures in (False, True):
        model, objective = tiny_models.llama(), Watching(measures_entropy=measures)
        make_trainer(model, lr=0.01).step(make_batch(([1, 2], [3, 4]), ([5], [6])), objective)
        assert [entropy is None for entropy in objective.seen] == [not measures]
        weights.append(parameters(model))
    assert same_tensors(*weights)
    assert not LikelihoodObjective.measures_entropy
