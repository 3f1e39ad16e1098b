"""PolicyObjective puts loss, KL, entropy and metrics together: four tokens by hand, in every combination.

token   r     A     logprob   what happens under PPO (eps .2, high .28, c 3)
0       1.5    2     -1       above the band: min(1.5 x 2, 1.28 x 2)         loss -2.56, clipped
1       0.5   -1     -2       below the band: max(.5, .8)                    loss   .8,  clipped
2       4     -.5    -.5      max(2, .64) = 2 above the cap 3 x .5           loss  1.5,  dual clip
3       1.1    1     -1       inside                                         loss -1.1
"""

import math

import pytest
import torch

from strop.algorithms import LikelihoodObjective, PolicyObjective, TrainableTokens
from strop.config import AlgorithmOptions
from strop.types import merge_metrics

F64 = torch.float64
RATIOS = (1.5, 0.5, 4.0, 1.1)
LOGPROBS = (-1.0, -2.0, -0.5, -1.0)
PPO = {"kind": "ppo_clip", "eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": 3.0}
PPO_LOSS = (-2.56, 0.8, 1.5, -1.1)
CISPO = {"kind": "cispo", "eps_clip": 1.0, "eps_clip_high": 1.0}
# weight = r cut at 2: 1.5, .5, 2, 1.1; loss = -weight A logprob
#   -1.5 x 2 x -1 = 3    -.5 x -1 x -2 = -1    -2 x -.5 x -.5 = -.5    -1.1 x 1 x -1 = 1.1
CISPO_LOSS = (3.0, -1.0, -0.5, 1.1)


def tokens(rows=slice(None), *, dtype=F64):
    """The four tokens. The reference gives each half of the policy's probability, so that d = ln 2; entropy 2 nats."""
    logprobs = torch.tensor(LOGPROBS, dtype=dtype)
    old = logprobs - torch.tensor(RATIOS, dtype=dtype).log()
    return TrainableTokens(
        logprobs=logprobs[rows].clone().requires_grad_(),
        entropy=torch.full((4,), 2.0, dtype=dtype)[rows],
        old_logprobs=old[rows],
        rollout_logprobs=(old - torch.tensor([0.1, -0.3, 0.0, 0.2], dtype=dtype))[rows],
        ref_logprobs=(logprobs - math.log(2))[rows],
        advantages=torch.tensor([2.0, -1.0, -0.5, 1.0], dtype=dtype)[rows],
        sequence_ids=torch.tensor([0, 0, 1, 2])[rows],
    )


def objective(**algorithm):
    options = AlgorithmOptions.model_validate(algorithm)
    return PolicyObjective(options, temperature=1.0, max_response_tokens=8)


def values(metrics):
    return {name: metric.value for name, metric in metrics.items()}


# With d = ln 2 = .693147:  k1 = .693147    k2 = .693147^2 / 2 = .240227    k3 = 1/2 + .693147 - 1 = .193147
@pytest.mark.parametrize("kind, kl", [("k1", 0.693147), ("k2", 0.240227), ("k3", 0.193147)])
@pytest.mark.parametrize("policy_loss, base", [(PPO, PPO_LOSS), (CISPO, CISPO_LOSS)], ids=["ppo_clip", "cispo"])
def test_the_loss_is_policy_loss_plus_kl_minus_entropy(policy_loss, base, kind, kl):
    found = objective(policy_loss=policy_loss, kl={"coef": 0.1, "kind": kind}, entropy_coef=0.01)
    loss, metrics = found.loss(tokens())
    # entropy bonus: -.01 x 2 = -.02
    assert loss.tolist() == pytest.approx([x + 0.1 * kl - 0.02 for x in base], abs=1e-6)
    assert metrics[f"kl_ref_{kind}"].value == pytest.approx(kl, abs=1e-6)
    assert metrics["entropy"].value == pytest.approx(2.0, abs=1e-12)


@pytest.mark.parametrize("policy_loss, base", [(PPO, PPO_LOSS), (CISPO, CISPO_LOSS)], ids=["ppo_clip", "cispo"])
def test_without_kl_and_entropy_the_loss_is_the_policy_loss(policy_loss, base):
    loss, metrics = objective(policy_loss=policy_loss).loss(tokens())
    assert loss.tolist() == pytest.approx(base, abs=1e-12)
    assert not any(name.startswith("kl_ref") for name in metrics)


@pytest.mark.parametrize(
    "policy_loss, gradients",
    [
        # no gradient from a token that the band or the cap decides; -A r = -1.1 from the last
        (PPO, [0.0, 0.0, 0.0, -1.1]),
        # -weight A: -1.5 x 2, -.5 x -1, -2 x -.5, -1.1 x 1
        (CISPO, [-3.0, 0.5, 1.0, -1.1]),
    ],
    ids=["ppo_clip", "cispo"],
)
def test_gradients_by_hand(policy_loss, gradients):
    sample = tokens()
    objective(policy_loss=policy_loss).loss(sample)[0].sum().backward()
    assert sample.logprobs.grad.tolist() == pytest.approx(gradients, abs=1e-12)


def test_the_kl_pulls_towards_the_reference():
    # d(k3)/d(logprob) = 1 - exp(-d) = 1 - 1/2 with d = ln 2; the policy loss of token 0 has no gradient
    sample = tokens(slice(0, 1))
    objective(policy_loss=PPO, kl={"coef": 0.1, "kind": "k3"}).loss(sample)[0].sum().backward()
    assert sample.logprobs.grad.tolist() == pytest.approx([0.05], abs=1e-12)


def test_metrics_by_hand():
    found = values(objective(policy_loss=PPO).loss(tokens())[1])
    assert found["clip_fraction"] == 0.5  # tokens 0 and 1
    assert found["dual_clip_fraction"] == 0.25  # token 2
    assert found["ratio_max"] == pytest.approx(4.0, rel=1e-6)
    assert found["ratio_min"] == pytest.approx(0.5, rel=1e-6)
    # |old - rollout| = .1, .3, 0, .2
    assert found["logprob_gap"] == pytest.approx(0.15, rel=1e-6)
    assert found["logprob_gap_max"] == pytest.approx(0.3, rel=1e-6)
    # 1/r + ln r - 1: .0721318 + .3068528 + .6362944 + .0044011 = 1.0196801, over 4
    assert found["kl_old_k3"] == pytest.approx(0.2549200, abs=1e-6)


def test_cispo_counts_the_weights_that_it_cut():
    found = values(objective(policy_loss=CISPO).loss(tokens())[1])
    assert found["clip_fraction"] == 0.25  # r = 4 alone is above 2
    assert "dual_clip_fraction" not in found


def test_dual_clip_is_reported_only_where_there_is_one():
    assert "dual_clip_fraction" not in objective(policy_loss=PPO | {"eps_clip_c": None}).loss(tokens())[1]


@pytest.mark.parametrize("policy_loss", [PPO, CISPO], ids=["ppo_clip", "cispo"])
def test_metrics_are_the_same_however_the_tokens_are_cut(policy_loss):
    found = objective(policy_loss=policy_loss, kl={"coef": 0.1})
    whole = values(found.loss(tokens())[1])
    parts = merge_metrics(found.loss(tokens([i]))[1] for i in (2, 0, 3, 1))
    assert values(parts) == pytest.approx(whole, rel=1e-6)


def test_ratio_metrics_stay_finite_where_the_ratio_overflows_float32():
    # case 14: old = -91, logprob -2: exp(89) is above float32's largest number
    sample = TrainableTokens(
        logprobs=torch.tensor([-2.0, -91.0], requires_grad=True),
        entropy=None,
        old_logprobs=torch.tensor([-91.0, -2.0]),
        rollout_logprobs=torch.tensor([-91.0, -2.0]),
        ref_logprobs=None,
        advantages=torch.tensor([1.0, 1.0]),
        sequence_ids=torch.tensor([0, 0]),
    )
    loss, metrics = objective(policy_loss=PPO).loss(sample)
    assert loss.isfinite().all()
    assert all(math.isfinite(value) for value in values(metrics).values()), values(metrics)


def test_the_reference_is_asked_for_only_where_the_kl_has_a_weight():
    assert not objective(kl={"coef": 0.0}).uses_reference
    assert objective(kl={"coef": 1e-9}).uses_reference
    # case 15: with coefficient 0 a reference of -inf cannot reach the loss
    sample = tokens()
    sample.ref_logprobs[1] = -torch.inf
    assert objective(policy_loss=PPO).loss(sample)[0].tolist() == pytest.approx(PPO_LOSS, abs=1e-12)


def test_a_negative_entropy_coefficient_is_a_penalty():
    assert objective(entropy_coef=-0.01).uses_entropy
    loss, _ = objective(policy_loss=PPO, entropy_coef=-0.01).loss(tokens())
    assert loss.tolist() == pytest.approx([x + 0.02 for x in PPO_LOSS], abs=1e-12)


def test_advantages_are_those_of_the_options():
    rewards, groups = torch.tensor([1.0, 3.0, 5.0, 5.0]), torch.tensor([7, 7, 2, 2])
    plain = objective(advantage={"kind": "group", "normalize_std": False})
    assert plain.advantages(rewards, groups).tolist() == [-1.0, 1.0, 0.0, 0.0]
    # std of [1, 3] with n - 1 is sqrt(2): 1 / (1.41421 + 1) = .41421
    wide = objective(advantage={"kind": "group", "normalize_std": True, "std_eps": 1.0})
    assert wide.advantages(rewards, groups).tolist() == pytest.approx([-0.41421, 0.41421, 0.0, 0.0], abs=1e-5)


# One prompt (group 4) with sequences of 1 and 3 trainable tokens, another (group 9) with one of 2, limit 8 tokens.
@pytest.mark.parametrize(
    "reduction, weights",
    [
        ("token_mean", [1 / 6, 1 / 6, 1 / 6, 1 / 6, 1 / 6, 1 / 6]),
        ("sequence_mean", [1 / 3, 1 / 9, 1 / 9, 1 / 9, 1 / 6, 1 / 6]),  # 3 sequences
        ("prompt_mean", [1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 4, 1 / 4]),  # 2 prompts of 4 and 2 tokens
        ("constant_length", [1 / 24, 1 / 24, 1 / 24, 1 / 24, 1 / 24, 1 / 24]),  # 3 sequences x 8
    ],
)
def test_token_weights_are_those_of_the_reduction(reduction, weights):
    found = objective(reduction=reduction).token_weights(
        torch.tensor([False, True, False, True, True, True, False, True, True]),
        torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 2]),
        torch.tensor([4, 4, 4, 4, 4, 4, 9, 9, 9]),
    )
    at_masked = [found[i].item() for i in (0, 2, 6)]
    assert at_masked == [0.0, 0.0, 0.0]
    assert found[found > 0].tolist() == pytest.approx(weights, abs=1e-12)


def test_likelihood_is_the_mean_negative_logprob():
    loss, metrics = LikelihoodObjective().loss(tokens())
    assert loss.tolist() == [1.0, 2.0, 0.5, 1.0]
    assert metrics["nll"].value == 1.125  # 4.5 / 4
