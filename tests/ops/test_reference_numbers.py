"""What public implementations compute from the same inputs, to 1e-9 in float64.

Compared on trainable tokens only: an implementation may write anything into a masked slot (some compute a loss there
and multiply by the mask later, some write 0), and strop selects masked tokens out before a loss is called.
"""

import json
from pathlib import Path

import pytest
import torch

from strop.ops import advantages as advantage_ops
from strop.ops import cispo, correction, group_advantages, kl_estimate, policy_loss, ppo_clip, token_weights

REFERENCE = json.loads((Path(__file__).parents[1] / "reference" / "loss_numbers.json").read_text())
INPUTS = REFERENCE["inputs"]
LOSSES = {"ppo_clip": ppo_clip, "cispo": cispo}
ROUNDING = {
    "rel": 1e-9,
    "abs": 1e-9,
}  # float64, and exp of the same numbers; 1e-9 leaves room for another order of sums


def cases(kind, *names, **fields):
    found = [
        case
        for case in REFERENCE["cases"]
        if case["kind"] == kind and case["name"] in names and all(case[k] == v for k, v in fields.items())
    ]
    return [pytest.param(case, id=f"{case['name']}-{case['source'].split()[0]}-{i}") for i, case in enumerate(found)]


def flat(rows):
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


def per_token(of_sequence):
    return [[x] * len(row) for x, row in zip(of_sequence, INPUTS["logprobs"], strict=True)]


MASK = flat(INPUTS["loss_mask"]).bool()
ADVANTAGES = flat(per_token(INPUTS["sequence_advantage"]))
SEQUENCE_IDS = flat(per_token(range(len(INPUTS["logprobs"])))).long()


def trainable(rows):
    return flat(rows)[MASK].tolist()


def test_the_inputs_have_masked_tokens_between_trainable_ones():
    assert MASK.numel() == 37
    assert int((~MASK).sum()) == 3


@pytest.mark.parametrize("case", cases("policy_loss", "ppo_clip", "cispo"))
def test_policy_loss_and_gradient(case):
    logprobs = flat(INPUTS["logprobs"]).requires_grad_()
    picked = logprobs[MASK], flat(INPUTS["old_logprobs"])[MASK], ADVANTAGES[MASK]
    loss, clipped = LOSSES[case["name"]](*picked, **case["options"])
    gradient = torch.autograd.grad(loss.sum(), logprobs)[0]
    assert loss.tolist() == pytest.approx(trainable(case["loss_per_token"]), **ROUNDING)
    assert gradient[MASK].tolist() == pytest.approx(trainable(case["grad_of_sum"]), **ROUNDING)
    assert gradient[~MASK].tolist() == [0.0] * 3
    assert clipped.tolist() == [x > 0 for x in trainable(case["clipped"])]


REDUCTIONS = {
    "token-mean": {"reduction": "token_mean"},
    "seq-mean-token-mean": {"reduction": "sequence_mean"},
    # the sum over a sequence's tokens, averaged over sequences: a constant length of 1
    "seq-mean-token-sum": {"reduction": "constant_length", "max_response_tokens": 1},
    "constant-length": {"reduction": "constant_length", "max_response_tokens": 16},
}


@pytest.mark.parametrize("case", cases("reduced_loss", "ppo_clip", "dapo", "dr_grpo"))
def test_reduced_loss_and_gradient(case):
    options = {name: value for name, value in case["options"].items() if name.startswith("eps_clip")}
    if case["reduction"] == "constant-length":
        assert case["options"]["max_response_len"] == 16
    weights = token_weights(MASK, SEQUENCE_IDS, **REDUCTIONS[case["reduction"]])
    logprobs = flat(INPUTS["logprobs"]).requires_grad_()
    losses = ppo_clip(logprobs[MASK], flat(INPUTS["old_logprobs"])[MASK], ADVANTAGES[MASK], **options).loss
    loss = (weights[MASK] * losses).sum()
    assert loss.item() == pytest.approx(case["loss"], **ROUNDING)
    gradient = torch.autograd.grad(loss, logprobs)[0]
    assert gradient[MASK].tolist() == pytest.approx(trainable(case["grad"]), **ROUNDING)


@pytest.mark.parametrize("case", cases("kl", "k1", "k2", "k3", options={}))
def test_kl_and_gradient(case):
    logprobs = flat(INPUTS["logprobs"]).requires_grad_()
    kl = kl_estimate(logprobs[MASK], flat(INPUTS["ref_logprobs"])[MASK], kind=case["name"])
    assert kl.tolist() == pytest.approx(trainable(case["kl_per_token"]), **ROUNDING)
    gradient = torch.autograd.grad(kl.sum(), logprobs)[0]
    assert gradient[MASK].tolist() == pytest.approx(trainable(case["grad_of_sum"]), **ROUNDING)


@pytest.mark.parametrize("case", cases("advantages", "grpo"))
def test_group_advantages(case):
    rewards = torch.tensor(INPUTS["rewards"], dtype=torch.float64)
    advantages = group_advantages(
        rewards, torch.tensor(INPUTS["group_id"]), normalize_std=case["options"]["std"], std_eps=1e-6
    )
    # the source divides by the sample deviation (ddof = 1) plus 1e-6, as strop does: the rounding tolerance is enough
    assert case["options"].get("ddof", 1) == 1
    found = flat(per_token(advantages.tolist()))[MASK].tolist()
    assert found == pytest.approx(trainable(case["advantages"]), **ROUNDING)


RATIO = "exp(logprobs-old_logprobs), gradient flows"


@pytest.mark.parametrize("case", cases("kl", "k1", "k2", "k3", options={"importance_ratio": RATIO}))
def test_kl_weighed_by_the_ratio_and_gradient(case):
    logprobs = flat(INPUTS["logprobs"]).requires_grad_()
    picked = logprobs[MASK], flat(INPUTS["ref_logprobs"])[MASK], flat(INPUTS["old_logprobs"])[MASK]
    kl = kl_estimate(*picked, kind=case["name"])
    assert kl.tolist() == pytest.approx(trainable(case["kl_per_token"]), **ROUNDING)
    gradient = torch.autograd.grad(kl.sum(), logprobs)[0]
    assert gradient[MASK].tolist() == pytest.approx(trainable(case["grad_of_sum"]), **ROUNDING)


# ---- losses of whole sequences ---------------------------------------------------------------------------------------

NUM_TRAINABLE = torch.bincount(SEQUENCE_IDS[MASK])[SEQUENCE_IDS].double()
NUM_TOKENS = torch.bincount(SEQUENCE_IDS)[SEQUENCE_IDS].double()


def whole(call, **options):
    """Loss, its gradient as a function of weights, and `clipped`, over all tokens with the mask."""
    logprobs = flat(INPUTS["logprobs"]).requires_grad_()
    loss, clipped = call(logprobs, flat(INPUTS["old_logprobs"]), ADVANTAGES, MASK, SEQUENCE_IDS, **options)
    return loss, lambda weights: torch.autograd.grad((weights * loss).sum(), logprobs, retain_graph=True)[0], clipped


@pytest.mark.parametrize("call", [policy_loss.gspo, policy_loss.gspo_token])
@pytest.mark.parametrize("case", cases("policy_loss", "gspo"))
def test_gspo_and_its_gradient(case, call):
    loss, gradient, clipped = whole(call, **case["options"])
    assert loss[MASK].tolist() == pytest.approx(trainable(case["loss_per_token"]), **ROUNDING)
    assert loss[~MASK].tolist() == [0.0] * 3
    assert clipped[MASK].tolist() == [x > 0 for x in trainable(case["clipped"])]
    # The source writes the sequence's loss into its masked slots too, and `grad_of_sum` sums those with the others: m
    # tokens of one loss instead of n trainable ones, so its gradient is m / n of that of the trainable tokens' sum.
    found = gradient(torch.ones_like(loss)) * NUM_TOKENS / NUM_TRAINABLE
    assert found[MASK].tolist() == pytest.approx(trainable(case["grad_of_sum"]), **ROUNDING)
    assert found[~MASK].tolist() == [0.0] * 3


def as_verl_averages(reduction):
    """verl adds 1e-8 to a sequence's number of tokens before it divides: the one thing in which strop differs."""
    weights = token_weights(MASK, SEQUENCE_IDS, reduction=reduction)
    return weights * NUM_TRAINABLE / (NUM_TRAINABLE + 1e-8)


@pytest.mark.parametrize("case", cases("reduced_loss", "sapo"))
@pytest.mark.parametrize(
    "weights, tolerance",
    [
        (as_verl_averages("sequence_mean"), 1e-13),  # the source to the last digits
        (token_weights(MASK, SEQUENCE_IDS, reduction="sequence_mean"), 1e-9),  # that it adds 1e-8 shows in the 10th
    ],
    ids=["denominator of verl", "denominator of strop"],
)
def test_sapo_and_its_gradient(case, weights, tolerance):
    assert case["reduction"] == "seq-mean-token-mean"
    logprobs = flat(INPUTS["logprobs"]).requires_grad_()
    loss, _ = policy_loss.sapo(logprobs, flat(INPUTS["old_logprobs"]), ADVANTAGES, **case["options"])
    reduced = (weights * loss).sum()
    assert reduced.item() == pytest.approx(case["loss"], abs=tolerance)
    gradient = torch.autograd.grad(reduced, logprobs)[0]
    assert gradient[MASK].tolist() == pytest.approx(trainable(case["grad"]), abs=tolerance)


@pytest.mark.parametrize("case", cases("reduced_loss", "gmpo"))
def test_gmpo_and_its_gradient_with_the_denominator_of_verl(case):
    # verl's geometric mean is exp(sum / (n + 1e-8)), so its exponent is n / (n + 1e-8) of strop's, in which the clipped
    # log-ratios are linear: moving old_logprobs would move the bounds, so the bounds are moved too.
    short = NUM_TRAINABLE / (NUM_TRAINABLE + 1e-8)
    assert case["reduction"] == "seq-mean"
    logprobs = flat(INPUTS["logprobs"]).requires_grad_()
    sequences = int(SEQUENCE_IDS.max()) + 1
    total = torch.zeros((), dtype=torch.float64)
    for s in range(sequences):
        part, factor = s == SEQUENCE_IDS, short[s == SEQUENCE_IDS][0].item()
        old = flat(INPUTS["old_logprobs"])[part]
        log_ratio = factor * (logprobs[part] - old)
        bounds = {name: factor * bound for name, bound in case["options"].items()}
        loss, _ = policy_loss.gmpo(
            log_ratio, torch.zeros_like(old), ADVANTAGES[part], MASK[part], SEQUENCE_IDS[part], **bounds
        )
        # verl multiplies by an advantage that it averages over the tokens with the same denominator
        total = total + loss[MASK[part]][0] * factor / sequences
    assert total.item() == pytest.approx(case["loss"], **ROUNDING)
    gradient = torch.autograd.grad(total, logprobs)[0]
    assert gradient[MASK].tolist() == pytest.approx(trainable(case["grad"]), **ROUNDING)
    loss, exact_gradient, _ = whole(policy_loss.gmpo, **case["options"])
    weights = token_weights(MASK, SEQUENCE_IDS, reduction="sequence_mean")
    exact = (weights * loss).sum().item()
    assert exact == pytest.approx(case["loss"], abs=2e-8)
    assert exact != pytest.approx(case["loss"], **ROUNDING)
    assert exact_gradient(weights)[MASK].tolist() == pytest.approx(trainable(case["grad"]), abs=2e-8)


# ---- advantages ------------------------------------------------------------------------------------------------------

REWARDS = torch.tensor(INPUTS["rewards"], dtype=torch.float64)
GROUPS = torch.tensor(INPUTS["group_id"])
BASELINES = {
    "rloo": lambda: advantage_ops.rloo(REWARDS, GROUPS),
    "opo": lambda: advantage_ops.opo(REWARDS, GROUPS, torch.bincount(SEQUENCE_IDS[MASK])),
    "maxrl": lambda: advantage_ops.maxrl(REWARDS, GROUPS, mean_eps=1e-6),
}


@pytest.mark.parametrize("case", cases("advantages", *BASELINES))
def test_advantages_of_rollouts(case):
    found = BASELINES[case["name"]]()[SEQUENCE_IDS][MASK].tolist()
    assert found == pytest.approx(trainable(case["advantages"]), **ROUNDING)


@pytest.mark.parametrize("case", cases("advantages", "reinforce_plus_plus"))
def test_reinforce_plus_plus(case):
    earned = advantage_ops.last_token_rewards(REWARDS, MASK, SEQUENCE_IDS)
    returns = advantage_ops.discounted_returns(earned, MASK, SEQUENCE_IDS, **case["options"])
    assert returns[MASK].tolist() == pytest.approx(trainable(case["returns"]), **ROUNDING)
    found = advantage_ops.reinforce_plus_plus(earned, MASK, SEQUENCE_IDS, **case["options"])
    assert found[MASK].tolist() == pytest.approx(trainable(case["advantages"]), **ROUNDING)
    assert found[~MASK].tolist() == [0.0] * 3


@pytest.mark.parametrize("case", cases("advantages", "gae_whitened"))
def test_gae(case):
    earned = advantage_ops.last_token_rewards(REWARDS, MASK, SEQUENCE_IDS)
    found = advantage_ops.gae(earned, flat(INPUTS["values"]), MASK, SEQUENCE_IDS, **case["options"], whiten=True)
    assert found.advantages[MASK].tolist() == pytest.approx(trainable(case["advantages"]), **ROUNDING)
    assert found.returns[MASK].tolist() == pytest.approx(trainable(case["returns"]), **ROUNDING)


# ---- corrections -----------------------------------------------------------------------------------------------------

OLD_AND_ROLLOUT = flat(INPUTS["old_logprobs"]), flat(INPUTS["rollout_logprobs"])


@pytest.mark.parametrize("case", cases("correction", "tis_token", "icepop_token"))
def test_corrections_by_token(case):
    call = {"tis_token": correction.truncate, "icepop_token": correction.mask}[case["name"]]
    bounds = {"min_ratio": case["options"]["tis_clip_low"], "max_ratio": case["options"]["tis_clip"]}
    found = call(*OLD_AND_ROLLOUT, MASK, SEQUENCE_IDS, level="token", **bounds)
    assert found[MASK].tolist() == pytest.approx(trainable(case["weights"]), **ROUNDING)


@pytest.mark.parametrize("case", cases("correction", "opsm"))
def test_opsm(case):
    logprobs, old = flat(INPUTS["logprobs"]), flat(INPUTS["old_logprobs"])
    found = correction.opsm(logprobs, old, ADVANTAGES, MASK, SEQUENCE_IDS, **case["options"])
    assert found[MASK].tolist() == trainable(case["weights"])


def test_every_reference_case_is_compared():
    compared = [
        *cases("policy_loss", "ppo_clip", "cispo", "gspo"),
        *cases("reduced_loss", "ppo_clip", "dapo", "dr_grpo", "sapo", "gmpo"),
        *cases("kl", "k1", "k2", "k3", options={}),
        *cases("kl", "k1", "k2", "k3", options={"importance_ratio": RATIO}),
        *cases("advantages", "grpo", *BASELINES, "reinforce_plus_plus", "gae_whitened"),
        *cases("correction", "tis_token", "icepop_token", "opsm"),
    ]
    left = [case["name"] for case in REFERENCE["cases"] if not any(case is found.values[0] for found in compared)]
    assert left == []
    assert len(compared) == 36
