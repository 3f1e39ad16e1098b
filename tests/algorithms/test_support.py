"""What explain says of the gradient's support is true of the losses: each condition is tried on a grid of tokens."""

from types import SimpleNamespace

import pytest
import torch

from strop.algorithms import objective_formula
from strop.algorithms.variants import POLICY_LOSSES
from strop.config import TrainConfig, make_config

# Values of each letter that a condition may have, around every default bound; q is the old probability, r = p / q.
OLD = [0.02, 0.3, 0.6]
RATIOS = [1e-3, 0.1, 0.5, 0.65, 0.79, 0.81, 0.99, 0.9998, 1.0003, 1.01, 1.19, 1.21, 1.27, 1.29, 1.45, 1.55, 1.65]
CASES = [(kind, {}) for kind in POLICY_LOSSES] + [
    ("ppo_clip", {"eps_clip": 0.1, "eps_clip_high": 0.3, "eps_clip_c": 1.5}),
    ("dppo", {"divergence": "kl"}),
    ("gmpo", {"eps_clip": 0.2, "eps_clip_high": 0.1}),
    ("clip_cov", {"eps_clip": 0.2, "eps_clip_high": 0.3}),
]


def _condition(kind, options):
    binding = POLICY_LOSSES[kind]
    return binding.no_gradient_where(options) if binding.no_gradient_where else "False"


def _binary_kl(q, p):
    return (q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()).item()


@pytest.mark.parametrize("kind, given", CASES, ids=[f"{kind}{i}" for i, (kind, _) in enumerate(CASES)])
def test_a_token_has_a_gradient_unless_the_condition_says_otherwise(kind, given):
    options = POLICY_LOSSES[kind].options(**given)
    condition, seen = _condition(kind, options), set()
    for q in OLD:
        for r in (r for r in RATIOS if r * q < 0.99):
            for A in (1.5, -1.5):
                for selected in (False, True):
                    logprobs = torch.tensor([q * r], dtype=torch.float64).log().requires_grad_()
                    tokens = SimpleNamespace(
                        logprobs=logprobs,
                        old_logprobs=torch.tensor([q], dtype=torch.float64).log(),
                        advantages=torch.tensor([A], dtype=torch.float64),
                        loss_mask=torch.tensor([True]),
                        sequence_ids=torch.tensor([0]),
                        selected=torch.tensor([selected]),
                    )
                    POLICY_LOSSES[kind](options, tokens).loss.sum().backward()
                    p = logprobs.detach().exp()
                    tv = abs(p.item() - q)
                    letters = {"A": A, "r": r, "s": r, "log_r": torch.tensor(r).log().item(), "selected": selected}
                    letters |= {"p": p.item(), "q": q}
                    letters["D"] = tv if given.get("divergence", "tv") == "tv" else _binary_kl(torch.tensor(q), p)
                    said = bool(eval(condition, {}, letters))
                    assert (logprobs.grad.item() == 0) == said, (condition, letters)
                    seen.add(said)
    assert seen == ({True, False} if condition != "False" else {False}), "the grid must meet both"


VALID = {"model": {"path": "m"}, "data": {"kind": "jsonl", "path": "d"}, "reward": {"kind": "exact"}}


def _text(**algorithm):
    config = make_config(TrainConfig, VALID | {"algorithm": {"updates_per_batch": 2, **algorithm}}, {}, file="run.toml")
    return objective_formula(config)


def test_explain_says_where_the_clipped_branch_takes_the_gradient():
    loss = {"kind": "ppo_clip", "eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": 3.0}
    text = _text(policy_loss=loss)
    assert "in loss_t, none where A > 0 and r > 1.28 or A < 0 and r < 0.8 or A < 0 and r > 3" in text
    assert "nor where A = 0, as in a group whose rewards are equal" in text


def test_a_loss_that_keeps_every_gradient_names_only_tokens_without_advantage():
    text = _text(preset="cispo")
    assert "in loss_t, none where A = 0, as in a group whose rewards are equal\n" in text
    assert "nor" not in text


def test_with_one_update_no_bound_is_named_because_none_decides():
    text = _text(preset="dapo", updates_per_batch=1)
    assert "every ratio is 1 in the only update of a batch, within all bounds" in text
    assert "r > 1.28" not in text


@pytest.mark.parametrize(
    "option, words",
    [
        ({"mask_truncated": True}, "that the policy wrote, in responses that ended by themselves"),
        ({"correction": {"kind": "mask"}}, "nor where the correction's weight is 0"),
        ({"veto_ratio": 1e-4}, "nor in a sequence that is set to 0 above"),
        ({"kl": {"coef": 0.1}}, "kl_t pulls at these too"),
        ({"kl": {"coef": 0.1}, "entropy_coef": 0.1}, "kl_t and entropy_t pull at these too"),
        (
            {"whiten_advantages": True},
            "in loss_t, none where A > 0 and r > 1.2 or A < 0 and r < 0.8\n    nor where A = 0\n",
        ),
    ],
)
def test_what_else_decides_over_a_gradient_is_said_where_it_is_set_and_only_there(option, words):
    assert words in _text(**option)
    assert words not in _text()
