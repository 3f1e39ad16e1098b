"""PolicyObjective puts loss, KL, entropy and metrics together: four tokens by hand, in every combination.

token   r     A     logprob   what happens under PPO (eps .2, high .28, c 3)
0       1.5    2     -1       above the band: min(1.5 x 2, 1.28 x 2)         loss -2.56, clipped
1       0.5   -1     -2       below the band: max(.5, .8)                    loss   .8,  clipped
2       4     -.5    -.5      max(2, .64) = 2 above the cap 3 x .5           loss  1.5,  dual clip
3       1.1    1     -1       inside                                         loss -1.1
"""

import math
from dataclasses import replace

import pytest
import torch

from strop.algorithms import ADVANTAGES, LikelihoodObjective, PolicyObjective, ScoredTokens, TrainableTokens
from strop.config import AlgorithmOptions
from strop.types import Metric, RewardError, merge_metrics

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
    # r - 1 - ln r: .0945349 + .1931472 + 1.6137056 + .0046898 = 1.9060775, over 4
    assert found["kl_old_policy_k3"] == pytest.approx(0.4765194, abs=1e-6)


def test_over_samples_of_the_old_policy_kl_old_policy_k3_is_the_kl_from_old_to_policy():
    # old (.5, .25, .25), now (.2, .4, .4), each token as often as the old policy draws it:
    # KL(old || now) = .5 ln(.5 / .2) + .5 ln(.25 / .4) = .2231436; KL(now || old) would be .1927450
    old = torch.tensor([0.5, 0.5, 0.25, 0.25]).log()
    now = torch.tensor([0.2, 0.2, 0.4, 0.4]).log()
    found = values(objective(policy_loss=PPO).loss(replace(tokens(), logprobs=now, old_logprobs=old))[1])
    assert found["kl_old_policy_k3"] == pytest.approx(0.2231436, abs=1e-6)


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
    # rollout 0 has three tokens, rollout 1 one, rollouts 2 and 3 two each
    where = [0, 0, 0, 1, 2, 2, 3, 3]
    rollouts = scored([1.0, 3.0, 5.0, 5.0], groups=[7, 7, 2, 2], sequence_ids=where)
    plain = objective(advantage={"kind": "group", "normalize_std": False})
    assert plain.advantages(rollouts).tolist() == [[-1.0, 1.0, 0.0, 0.0][s] for s in where]
    # std of [1, 3] with n - 1 is sqrt(2): 1 / (1.41421 + 1) = .41421
    wide = objective(advantage={"kind": "group", "normalize_std": True, "std_eps": 1.0})
    expected = [[-0.41421, 0.41421, 0.0, 0.0][s] for s in where]
    assert wide.advantages(rollouts).tolist() == pytest.approx(expected, abs=1e-5)


def scored(rewards, *, groups, sequence_ids, loss_mask=None, **more):
    """Rollouts whose tokens are all trainable unless a mask says otherwise."""
    mask = torch.tensor(loss_mask or [True] * len(sequence_ids))
    ids = torch.tensor(sequence_ids)
    return ScoredTokens(
        rewards=torch.tensor(rewards, dtype=F64),
        group_ids=torch.tensor(groups),
        lengths=torch.bincount(ids[mask], minlength=len(rewards)),
        loss_mask=mask,
        sequence_ids=ids,
        **more,
    )


@pytest.mark.parametrize("kind", sorted(set(ADVANTAGES) - {"gdpo", "pass_at_k"}))
def test_rollouts_of_one_token_each_get_the_advantage_of_their_own_rollout(kind):
    # As many tokens as rollouts: a result per rollout must not pass for one per token, nor the other way round.
    # Rewards 1 and 0 of one group: every estimator gives rollout 0, whose token comes second, the positive advantage.
    rollouts = scored([1.0, 0.0], groups=[0, 0], sequence_ids=[1, 0], values=torch.zeros(2))
    found = objective(advantage={"kind": kind}).advantages(rollouts)
    assert found[1] > 0 > found[0]


def test_whitening_is_over_tokens_not_over_rollouts():
    # advantages -1, 1 on 3 and 1 tokens: mean -.5, squared distances 3 x .25 + 2.25 = 3, deviation sqrt(3 / 3) = 1
    white = objective(advantage={"kind": "group", "normalize_std": False}, whiten_advantages=True)
    found = white.advantages(scored([1.0, 3.0], groups=[0, 0], sequence_ids=[0, 0, 0, 1]))
    assert found.tolist() == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=1e-6)


@pytest.mark.parametrize("unused", [math.nan, math.inf, -math.inf])
def test_the_kl_in_the_reward_is_taken_from_each_tokens_return(unused):
    # k1 = old - ref = .5 on token 0 alone, coef .2: -.1 there. Returns with gamma 1: rollout 0: 1 - .1 = .9, 1;
    # rollout 1: 0. Mean .63333, squared distances .07111 + .13444 + .40111 = .60667, deviation sqrt(.30333) = .55076:
    # .26667 / .55076 = .48418, .36667 / .55076 = .66575, -.63333 / .55076 = -1.14993. What stands at the prompt is not used.
    found = objective(
        advantage={"kind": "reinforce_plus_plus", "gamma": 1.0}, kl={"coef": 0.2, "kind": "k1", "place": "reward"}
    ).advantages(
        scored(
            [1.0, 0.0],
            groups=[0, 1],
            sequence_ids=[0, 0, 0, 1],
            loss_mask=[False, True, True, True],
            old_logprobs=torch.tensor([unused, -1.0, -1.0, -1.0]),
            ref_logprobs=torch.tensor([unused, -1.5, -1.0, -1.0]),
        )
    )
    assert found.tolist() == pytest.approx([0.0, 0.48418, 0.66575, -1.14993], abs=2e-5)


def test_each_reward_is_on_its_token_and_the_kl_on_its_own():
    # Rollout 0 (tokens 1..3 after a prompt token): earns 2 at its first, .5 at its last; k1 of token 2 is .5, coef .2: -.1.
    # gamma .5: .5; -.1 + .25 = .15; 2 + .075 = 2.075. Rollout 1: a plain 1 on its one token.
    # Mean 3.725 / 4 = .93125; distances 1.14375, -.78125, -.43125, .06875; squares 1.308164 + .610352 + .185977 + .004727;
    # deviation sqrt(.703073) = .838494: 1.364053, -.931730, -.514315, .081992
    rollouts = scored(
        [2.5, 1.0],
        groups=[0, 1],
        sequence_ids=[0, 0, 0, 0, 1],
        loss_mask=[False, True, True, True, True],
        old_logprobs=torch.tensor([math.nan, -1.0, -1.0, -1.0, -1.0]),
        ref_logprobs=torch.tensor([math.nan, -1.0, -1.5, -1.0, -1.0]),
        token_rewards=torch.tensor([0.0, 2.0, 0.0, 0.5, 1.0], dtype=F64),
        step_mask=torch.tensor([False, True, False, True, True]),
    )
    kl = {"coef": 0.2, "kind": "k1", "place": "reward"}
    found = objective(advantage={"kind": "reinforce_plus_plus", "gamma": 0.5}, kl=kl).advantages(rollouts)
    assert found.tolist() == pytest.approx([0.0, 1.364053, -0.931730, -0.514315, 0.081992], abs=2e-5)


def test_without_rewards_of_their_own_tokens_earn_the_outcome_at_the_last():
    # process with one step per rollout is GRPO: [1, 3] without division give -1, 1 on every token
    found = objective(advantage={"kind": "process", "normalize_std": False})
    rollouts = scored([1.0, 3.0], groups=[7, 7], sequence_ids=[0, 0, 1], loss_mask=[False, True, True])
    assert found.advantages(rollouts).tolist() == [0.0, -1.0, 1.0]


@pytest.mark.parametrize("kind", ["gspo", "gmpo", "topr"])
def test_a_loss_of_whole_sequences_refuses_rewards_that_tokens_earn(kind):
    rollouts = scored(
        [1.0, 3.0], groups=[0, 0], sequence_ids=[0, 1], step_mask=torch.ones(2, dtype=torch.bool),
        token_rewards=torch.tensor([1.0, 3.0], dtype=F64),
    )  # fmt: skip
    found = objective(policy_loss={"kind": kind}, advantage={"kind": "reinforce_plus_plus"})
    with pytest.raises(RewardError, match=f"policy_loss.kind must not be {kind} with rewards per token or turn"):
        found.advantages(rollouts)
    # sums are one number per sequence
    objective(policy_loss={"kind": kind}).advantages(rollouts)


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
    tensors = objective(reduction=reduction).step_tensors(
        loss_mask=torch.tensor([False, True, False, True, True, True, False, True, True]),
        sequence_ids=torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 2]),
        group_ids=torch.tensor([4, 4, 4, 4, 4, 4, 9, 9, 9]),
        old_logprobs=None,
        advantages=torch.zeros(9),
    )
    assert tensors.keys() == {"token_weights"}
    found = tensors["token_weights"]
    at_masked = [found[i].item() for i in (0, 2, 6)]
    assert at_masked == [0.0, 0.0, 0.0]
    assert found[found > 0].tolist() == pytest.approx(weights, abs=1e-12)


def test_likelihood_is_the_mean_negative_logprob():
    loss, metrics = LikelihoodObjective().loss(tokens())
    assert loss.tolist() == [1.0, 2.0, 0.5, 1.0]
    assert metrics["nll"].value == 1.125  # 4.5 / 4


# ---- what is decided over a whole step -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["clip_cov", "kl_cov"])
def test_the_tokens_of_a_covariance_loss_are_selected_over_the_whole_step(kind):
    # Two of four trainable tokens. old - mean(-2) = 1, -1, 2, -2 and A - mean(0) = 1, -1, 1, -1: covariances 1, 1, 2, 2.
    # The masked token would have the largest of all. Chosen per sequence it would be one of each.
    more = {"cov_low": 0.0, "cov_high": 9.0} if kind == "clip_cov" else {}
    found = objective(policy_loss={"kind": kind, "cov_fraction": 0.5, **more})
    assert found.needs_old_logprobs
    tensors = found.step_tensors(
        loss_mask=torch.tensor([True, True, False, True, True]),
        sequence_ids=torch.tensor([0, 0, 0, 1, 1]),
        group_ids=torch.zeros(5, dtype=torch.int64),
        old_logprobs=torch.tensor([-1.0, -3.0, 90.0, 0.0, -4.0]),
        advantages=torch.tensor([1.0, -1.0, 90.0, 1.0, -1.0]),
    )
    assert tensors["selected"].tolist() == [False, False, False, True, True]
    assert tensors["token_weights"].tolist() == [0.25, 0.25, 0.0, 0.25, 0.25]


@pytest.mark.parametrize(
    "options, needed",
    [
        ({}, False),
        ({"updates_per_batch": 2}, True),
        ({"policy_loss": {"kind": "kl_cov"}}, True),
        ({"kl": {"coef": 0.1}}, False),
        ({"kl": {"coef": 0.1, "place": "reward"}, "advantage": {"kind": "reinforce_plus_plus"}}, True),
        ({"kl": {"coef": 0.0, "place": "reward"}, "advantage": {"kind": "reinforce_plus_plus"}}, False),
    ],
)
def test_a_pass_for_old_logprobs_is_made_only_where_the_formula_uses_them(options, needed):
    assert objective(**options).needs_old_logprobs == needed


# ---- corrections -----------------------------------------------------------------------------------------------------
# The sampler's gaps old - rollout are .1, -.3, 0, .2: ratios 1.10517, .74082, 1, 1.22140.


def test_a_truncated_ratio_multiplies_the_loss_and_not_the_entropy():
    # weights min(ratio, 1.2): 1.10517, .74082, 1, 1.2
    found = objective(policy_loss=PPO, correction={"kind": "truncate", "max_ratio": 1.2}, entropy_coef=0.01)
    loss, metrics = found.loss(tokens())
    expected = [-2.56 * 1.105171 - 0.02, 0.8 * 0.740818 - 0.02, 1.5 - 0.02, -1.1 * 1.2 - 0.02]
    assert loss.tolist() == pytest.approx(expected, abs=1e-5)
    assert metrics["correction_weight"].value == pytest.approx((1.105171 + 0.740818 + 1 + 1.2) / 4, abs=1e-6)
    assert metrics["correction_rejected"].value == 0.0


def test_a_rejected_token_loses_its_policy_loss_and_keeps_its_kl():
    # kept within [.8, 1.15]: tokens 0 and 2; .1 k3(ln 2) = .0193147 on all four
    found = objective(
        policy_loss=PPO, correction={"kind": "mask", "min_ratio": 0.8, "max_ratio": 1.15}, kl={"coef": 0.1}
    )
    loss, metrics = found.loss(tokens())
    kl = 0.0193147
    assert loss.tolist() == pytest.approx([-2.56 * 1.105171 + kl, kl, 1.5 + kl, kl], abs=1e-5)
    assert metrics["correction_rejected"].value == 0.5


def test_a_rejected_token_cannot_make_the_loss_infinite():
    sample = tokens()
    sample.advantages[1] = math.inf
    found = objective(policy_loss=PPO, correction={"kind": "mask", "min_ratio": 0.8, "max_ratio": 1.15})
    assert found.loss(sample)[0].isfinite().all()


def test_a_veto_leaves_out_the_sequence_of_the_unlikely_token():
    # token 1 of sequence 0 is at .74 < .75: tokens 0 and 1 leave
    loss, metrics = objective(policy_loss=PPO, veto_ratio=0.75).loss(tokens())
    assert loss.tolist() == pytest.approx([0.0, 0.0, 1.5, -1.1], abs=1e-12)
    assert metrics["veto_rejected"].value == 0.5


def test_opsm_leaves_out_bad_sequences_whose_tokens_became_unlikely():
    # mean(old - logprobs): sequence 0: -(ln 1.5 + ln .5) / 2 = .14384, of which token 1 has A < 0; 1 and 2 became likelier
    loss, metrics = objective(policy_loss=PPO, opsm_delta=0.1).loss(tokens())
    assert loss.tolist() == pytest.approx([-2.56, 0.0, 1.5, -1.1], abs=1e-12)
    assert metrics["opsm_rejected"].value == 0.25
    assert objective(policy_loss=PPO, opsm_delta=0.15).loss(tokens())[1]["opsm_rejected"].value == 0.0


def test_the_samplers_logprobs_as_the_old_ones_measure_the_gap_only_before_the_policy_moves():
    found = objective(policy_loss=PPO, old_logprobs="rollout")
    # |logprobs - rollout| = |ln 1.5 + .1|, |ln .5 - .3|, ln 4, ln 1.1 + .2 = .50547, .99315, 1.38629, .29531
    gap = found.loss(tokens())[1]["logprob_gap"].value
    assert gap == pytest.approx((0.505465 + 0.993147 + 1.386294 + 0.295310) / 4, abs=1e-6)
    moved = found.loss(replace(tokens(), measures_gap=False))[1]
    assert not [name for name in moved if name.startswith("logprob_gap")]


def test_the_unbiased_kl_is_weighed_by_the_ratio_with_gradient():
    # token 3: r = 1.1, k1 = ln 2: value .1 x 1.1 x .693147; gradient .1 (r k1 + r) = .1 x 1.1 x 1.693147, and -A r = -1.1
    sample = tokens(slice(3, 4))
    found = objective(policy_loss=PPO, kl={"coef": 0.1, "kind": "k1", "unbiased": True})
    loss, metrics = found.loss(sample)
    assert loss.item() == pytest.approx(-1.1 + 0.0762462, abs=1e-6)
    loss.sum().backward()
    assert sample.logprobs.grad.item() == pytest.approx(-1.1 + 0.1862462, abs=1e-6)
    assert metrics["kl_ref_k1"].value == pytest.approx(0.762462, abs=1e-5)


def test_a_kl_in_the_reward_is_not_in_the_loss_as_well():
    found = objective(policy_loss=PPO, kl={"coef": 0.1, "place": "reward"}, advantage={"kind": "reinforce_plus_plus"})
    assert found.loss(tokens())[0].tolist() == pytest.approx(PPO_LOSS, abs=1e-12)


# ---- coefficients that adapt -----------------------------------------------------------------------------------------


def test_the_kl_coefficient_follows_its_target_and_acts_on_the_next_loss():
    found = objective(policy_loss=PPO, kl={"coef": 0.1, "target": 0.1, "horizon_steps": 2})
    before, metrics = found.loss(tokens())
    # KL .193147 against .1: the error .93 is held at .2; .1 (1 + .2 / 2) = .11
    assert found.adapt(metrics)["kl_coef"].value == pytest.approx(0.11, abs=1e-12)
    after, _ = found.loss(tokens())
    assert (after - before).tolist() == pytest.approx([0.01 * 0.193147] * 4, abs=1e-7)


def test_a_kl_below_its_target_lowers_the_coefficient():
    # .193147 / .2 - 1 = -.034265, over 10 batches: .1 (1 - .0034265)
    found = objective(kl={"coef": 0.1, "target": 0.2, "horizon_steps": 10})
    assert found.adapt(found.loss(tokens())[1])["kl_coef"].value == pytest.approx(0.09965735, abs=1e-7)
    # .193147 / 10 - 1 = -.98 is held at -.2: .1 (1 - .2 / 10)
    found = objective(kl={"coef": 0.1, "target": 10.0, "horizon_steps": 10})
    assert found.adapt(found.loss(tokens())[1])["kl_coef"].value == pytest.approx(0.098, abs=1e-12)


@pytest.mark.parametrize(
    "target, start, expected", [(2.5, 0.0, 0.25), (1.5, 0.375, 0.125), (1.5, 0.125, 0.0), (2.5, 0.5, 0.75)]
)
def test_the_entropy_coefficient_follows_its_target(target, start, expected):
    # the entropy is 2: up by .25 below the target, else down, never below 0
    found = objective(entropy_coef=start, entropy_target=target, entropy_step=0.25)
    assert found.uses_entropy
    assert found.adapt(found.loss(tokens())[1])["entropy_coef"].value == expected
    assert found.loss(tokens())[0].tolist() == pytest.approx(
        [x - 2.0 * expected for x in objective().loss(tokens())[0].tolist()], abs=1e-12
    )


def test_fixed_coefficients_stay_and_are_no_metric():
    found = objective(kl={"coef": 0.1}, entropy_coef=0.01)
    assert found.adapt(found.loss(tokens())[1]) == {}
    assert found.state() == {"kl_coef": 0.1, "entropy_coef": 0.01}


def test_a_batch_without_a_step_adapts_nothing():
    found = objective(kl={"coef": 0.1, "target": 0.1}, entropy_target=1.0)
    assert found.adapt({"skipped_steps": Metric("sum", 1.0)}) == {}
    assert found.state() == {"kl_coef": 0.1, "entropy_coef": 0.0}


def test_the_state_of_one_objective_goes_on_in_another():
    options = {"kl": {"coef": 0.1, "target": 0.1, "horizon_steps": 2}, "entropy_target": 2.5}
    first, second = objective(**options), objective(**options)
    first.adapt(first.loss(tokens())[1])
    second.load_state(first.state())
    assert second.loss(tokens())[0].tolist() == first.loss(tokens())[0].tolist()
    assert first.state() != objective(**options).state()


def test_the_gap_to_the_sampler_is_measured_on_tokens_that_the_policy_of_now_sampled():
    """Gaps .1, .3, 0, .2; the second was sampled by an older policy: the mean of the others is .1, the largest .2."""
    fresh = torch.tensor([True, False, True, True])
    found = objective(policy_loss=PPO).loss(replace(tokens(), is_fresh=fresh))[1]
    assert found["logprob_gap"].value == pytest.approx(0.1)
    assert found["logprob_gap"].count == 3
    assert found["logprob_gap_max"].value == pytest.approx(0.2)


def test_where_no_token_is_fresh_there_is_no_gap_to_guard():
    old = torch.zeros(4, dtype=torch.bool)
    found = objective(policy_loss=PPO).loss(replace(tokens(), is_fresh=old))[1]
    assert [name for name in found if name.startswith("logprob_gap")] == []
