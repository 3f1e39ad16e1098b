"""The printed objective has the numbers of the config in it, and nothing of what the config does not use."""

import pytest

from strop.algorithms import objective_formula
from strop.config import TrainConfig, make_config

VALID = {"model": {"path": "m"}, "data": {"kind": "jsonl", "path": "d"}, "reward": {"kind": "exact"}}


def formula(**tables):
    return objective_formula(make_config(TrainConfig, VALID | tables, {}, file="run.toml"))


def test_ppo_clip_with_everything():
    text = formula(
        algorithm={
            "policy_loss": {"kind": "ppo_clip", "eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": 3.5},
            "kl": {"coef": 0.07, "kind": "k2"},
            "advantage": {"kind": "group", "std_eps": 0.125},
            "entropy_coef": 0.003,
            "reduction": "constant_length",
            "updates_per_batch": 4,
        },
        rollout={"prompts_per_step": 8, "group_size": 6, "max_response_tokens": 77, "temperature": 0.9},
        run={"num_steps": 5},
    )
    assert "sum_t w_t [ loss_t + 0.07 kl_t - 0.003 entropy_t ]" in text
    assert "max(-A_t r_t, -A_t clip(r_t, 0.8, 1.28))" in text
    assert "min(loss_t, 3.5 |A_t|)   where A_t < 0" in text
    assert "kl_t = d_t^2 / 2,  d_t = logprobs_t - ref_logprobs_t" in text
    assert "A_t = (R - mean_group(R)) / (std_group(R) + 0.125)" in text
    assert "1 / (sequences of the step x 77)" in text
    assert "at temperature 0.9" in text
    assert "8 prompts x 6 samples = 48 sequences of at most 77 tokens" in text
    # 48 sequences in 4 updates; 5 batches x 4 updates
    assert "4 optimizer steps of 12 sequences -> 20 optimizer steps in 5 batches" in text
    assert "the last update of a batch is 3 steps off-policy" in text


def test_cispo_names_its_band_and_its_source():
    text = formula(algorithm={"preset": "cispo"})
    assert "-stop_gradient(clip(r_t, 0, 5)) A_t logprobs_t" in text  # 1 - 1 and 1 + 4
    assert "MiniMax-M1, arXiv:2506.13585" in text
    assert "w_t = 1 / (trainable tokens of the step)" in text


def test_the_upper_bound_is_the_lower_ones_distance_unless_given():
    text = formula(algorithm={"policy_loss": {"kind": "ppo_clip", "eps_clip": 0.3}, "updates_per_batch": 2})
    assert "clip(r_t, 0.7, 1.3)" in text


@pytest.mark.parametrize("absent", ["kl_t", "entropy_t", "dual clip", "left out", "at temperature", "ref_logprobs"])
def test_what_is_not_used_is_not_printed(absent):
    assert absent not in formula()


def test_a_penalty_on_entropy_is_printed_with_its_sign():
    assert "loss_t + 0.5 entropy_t" in formula(algorithm={"entropy_coef": -0.5})


@pytest.mark.parametrize(
    "reduction, weight",
    [
        ("sequence_mean", "sequences of the step x trainable tokens of its sequence"),
        ("prompt_mean", "prompts of the step x trainable tokens of its prompt"),
    ],
)
def test_the_reduction_is_printed_as_a_weight(reduction, weight):
    assert f"w_t = 1 / ({weight})" in formula(algorithm={"reduction": reduction})


def test_masked_truncation_is_printed():
    assert "responses cut at the limit are left out" in formula(algorithm={"mask_truncated": True})


def test_dr_grpo_divides_by_no_standard_deviation():
    text = formula(algorithm={"preset": "dr_grpo"})
    assert "A_t = R - mean_group(R)" in text
    assert "std_group" not in text


def test_a_preset_that_was_changed_is_not_credited_with_the_change():
    assert "(preset cispo: MiniMax-M1" in formula(algorithm={"preset": "cispo"})
    same = {"preset": "cispo", "policy_loss": {"kind": "cispo", "eps_clip_high": 4.0}, "updates_per_batch": 2}
    assert "(preset cispo: MiniMax-M1" in formula(algorithm=same)
    for changed in ({"policy_loss": {"kind": "ppo_clip"}}, {"reduction": "sequence_mean"}, {"kl": {"coef": 0.1}}):
        text = formula(algorithm={"preset": "cispo", **changed})
        assert "(preset cispo, with changes of yours: MiniMax-M1" in text, changed


@pytest.mark.parametrize(
    "algorithm, shown, absent",
    [
        # with the sampler's log-probabilities, whatever line says old_logprobs means those
        (
            {
                "old_logprobs": "rollout",
                "advantage": {"kind": "reinforce_plus_plus"},
                "kl": {"coef": 0.1, "place": "reward"},
            },
            ["d_t = old_logprobs_t - ref_logprobs_t", "old_logprobs: the sampler's own, rollout_logprobs"],
            "the trainer's",
        ),
        ({"preset": "rloo"}, ["loss_t = -A_t logprobs_t"], "r_t"),
        ({"preset": "rloo", "correction": {"kind": "mask"}}, ["old_logprobs: the trainer's, before the update"], "r_t"),
        (
            {"preset": "rloo", "kl": {"coef": 0.1, "unbiased": True}, "updates_per_batch": 2},
            [
                "r_t = exp(logprobs_t - old_logprobs_t)\n",
                "old_logprobs: the trainer's, before the batch's first update",
            ],
            "rollout_logprobs",
        ),
        ({"preset": "dapo"}, ["r_t = exp(logprobs_t - old_logprobs_t) = 1 in value"], "rollout_logprobs"),
    ],
)
def test_every_letter_of_the_formula_is_said_and_none_that_it_has_not(algorithm, shown, absent):
    text = formula(algorithm=algorithm)
    assert [line for line in shown if line not in text] == [], text
    assert absent not in text


def test_whitening_is_said_after_what_it_whitens():
    text = formula(algorithm={"whiten_advantages": True})
    assert text.index("A_t = (R") < text.index("then A is brought to mean 0 and deviation 1")


def test_the_formula_of_ppo_has_its_advantage_and_what_the_critic_minimises():
    text = formula(
        algorithm={"preset": "ppo", "advantage": {"gamma": 0.9}}, critic={"eps_clip_value": 0.3, "only_first_steps": 2}
    )
    assert "A_t = whiten(G_t),  G_t = delta_t + 0.9 x 0.95 G_next" in text
    assert "delta_t = earned_t + 0.9 V_next - V_t" in text
    assert "earned_t = R_t - token_kl_t" in text
    assert "token_kl_t = 0.02 kl_t" in text
    assert "clip(V_t, old V_t - 0.3, old V_t + 0.3) - target_t)^2) / 2" in text
    assert "target_t = old V_t + G_t\n" in text
    assert "in the first 2 only the critic learns" in text


def test_the_formula_of_vapo_has_both_of_its_lambdas():
    text = formula(algorithm={"preset": "vapo"}, critic={"eps_clip_value": None})
    assert "G_t = delta_t + lambda G_next" in text
    assert "lambda = max(0, 1 - 1 / (0.05 x response tokens))" in text
    assert "critic: minimise  sum_t w_t (V_t - target_t)^2 / 2" in text
    assert "target_t = old V_t + the G_t with lambda 1" in text


def test_without_a_critic_the_formula_does_not_speak_of_one():
    assert "critic" not in formula(algorithm={"preset": "grpo"})


@pytest.mark.parametrize(
    "tables, passes",
    [
        ({}, "old_logprobs none, the only update takes its own; reference none; values none"),
        ({"algorithm": {"updates_per_batch": 4}}, "old_logprobs of 3 of 4 parts, the first update takes its own"),
        ({"algorithm": {"old_logprobs": "rollout"}}, "old_logprobs none, the sampler's are taken"),
        ({"algorithm": {"policy_loss": {"kind": "kl_cov"}}}, "old_logprobs of the whole batch"),
        ({"algorithm": {"kl": {"coef": 0.1}}}, "reference a frozen copy of the model"),
        ({"algorithm": {"kl": {"coef": 0.1}}, "lora": {"rank": 4}}, "reference the model without its adapters"),
        ({"algorithm": {"advantage": {"kind": "gae"}}}, "values of the critic"),
    ],
)
def test_the_passes_of_a_batch_are_named(tables, passes):
    assert passes in formula(**tables)


def test_where_sampling_is_ahead_the_formula_says_how_far_off_policy_a_step_may_be():
    """One batch of 2 updates ahead: 2 steps, and 3 for the second update. Streaming keeps to the option itself."""
    two = {"updates_per_batch": 2}
    text = formula(algorithm=two, rollout={"max_off_policy_steps": 3})
    assert "sampled 1 batch ahead, each batch by the weights of one step" in text
    assert "the first update of a batch is up to 2 steps off-policy, the last up to 3 steps" in text
    assert "old_logprobs: the sampler's own, rollout_logprobs" in text
    text = formula(algorithm=two, rollout={"max_off_policy_steps": 5, "streaming": True, "mask_older_tokens": True})
    assert "sampled up to 2 batches ahead, a step starts with the groups that are complete" in text
    assert "the first update of a batch is up to 5 steps off-policy, the last up to 6 steps" in text
    assert "tokens of older weights than their response's last ones are left out of the loss" in text
    text = formula(algorithm={"policy_loss": {"kind": "reinforce"}}, rollout={"max_off_policy_steps": 1})
    assert "loss_t is multiplied by exp(old_logprobs_t - rollout_logprobs_t), held in [0, 2]" in text
