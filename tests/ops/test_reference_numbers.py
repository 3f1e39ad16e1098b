"""What public implementations compute from the same inputs, to 1e-9 in float64.

Compared on trainable tokens only: an implementation may write anything into a masked slot (some compute a loss there
and multiply by the mask later, some write 0), and strop selects masked tokens out before a loss is called.
"""

import json
from pathlib import Path

import pytest
import torch

from strop.ops import cispo, group_advantages, kl_estimate, ppo_clip, token_weights

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


@pytest.mark.parametrize(
    "kind, names, count",
    [
        ("policy_loss", ("ppo_clip", "cispo"), 8),
        ("reduced_loss", ("ppo_clip", "dapo", "dr_grpo"), 5),
        ("advantages", ("grpo",), 2),
    ],
)
def test_no_reference_case_is_lost(kind, names, count):
    assert len(cases(kind, *names)) == count
