"""Rules for slime's flags of the objective: estimator, clip, KL, corrections, averages, batch."""

from __future__ import annotations

from pathlib import Path

from strop.compat.import_slime.draft import Draft, Given

_ESTIMATORS = {  # slime's name -> kind of the policy loss, kind of the advantage
    "grpo": ("ppo_clip", "group"),
    "gspo": ("gspo", "group"),
    "cispo": ("cispo", "group"),
    "reinforce_plus_plus": ("ppo_clip", "reinforce_plus_plus"),
    "reinforce_plus_plus_baseline": ("ppo_clip", "reinforce_plus_plus_baseline"),
    "ppo": ("ppo_clip", "gae"),
}
_EPS_CLIP = "0.2"  # slime's default, whatever the estimator
_KL_KINDS = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}


def _estimator(given: Given) -> str:
    return given.text("--advantage-estimator", "grpo")


def _advantage(given: Given) -> str:
    return _ESTIMATORS.get(_estimator(given), ("", "group"))[1]


def estimator(given: Given, draft: Draft) -> None:
    """--advantage-estimator and the bounds of its loss."""
    flag, name = "--advantage-estimator", _estimator(given)
    loss, advantage = _ESTIMATORS.get(name, ("ppo_clip", "group"))
    if name in _ESTIMATORS:
        flags = (flag,) if given.has(flag) else ()
        draft.set("algorithm.policy_loss.kind", loss, *flags)
        draft.set("algorithm.advantage.kind", advantage, *flags)
    else:
        why = "strop knows no estimator of slime by this name"
        draft.without(flag, f"{why}; the config has the clipped loss of PPO with GRPO's advantage.")
    low = given.text("--eps-clip", _EPS_CLIP)
    for given_flag, option, value in (
        ("--eps-clip", "eps_clip", low),
        ("--eps-clip-high", "eps_clip_high", given.text("--eps-clip-high", low)),
    ):
        if given.has(given_flag):
            draft.set(f"algorithm.policy_loss.{option}", value, given_flag)
        elif loss != "ppo_clip":  # strop's defaults are the papers' there
            draft.set(f"algorithm.policy_loss.{option}", value)
    if given.has("--eps-clip-c"):
        draft.set("algorithm.policy_loss.eps_clip_c", given.text("--eps-clip-c"), "--eps-clip-c")


def advantages(given: Given, draft: Draft) -> None:
    """What changes the advantages of an estimator."""
    kind = _advantage(given)
    if given.has("--gamma"):
        if kind in ("reinforce_plus_plus", "gae"):
            draft.set("algorithm.advantage.gamma", given.text("--gamma"), "--gamma")
        else:
            draft.without("--gamma", "acts with reinforce_plus_plus and ppo alone, in slime too.")
    if kind == "gae":
        flags = ("--normalize-advantages",) if given.has("--normalize-advantages") else ()
        draft.set("algorithm.advantage.whiten", bool(flags), *flags)
    elif given.has("--normalize-advantages"):
        if kind == "group":
            draft.set("algorithm.whiten_advantages", True, "--normalize-advantages")
        else:
            draft.same("--normalize-advantages", f"algorithm.advantage.kind = {kind} whitens already")
    if given.has("--disable-grpo-std-normalization"):
        if kind == "group":
            draft.set("algorithm.advantage.normalize_std", False, "--disable-grpo-std-normalization")
        else:
            draft.without("--disable-grpo-std-normalization", "acts with group estimators alone, in slime too.")
    if given.has("--disable-rewards-normalization"):
        if kind in ("reinforce_plus_plus", "gae"):
            draft.same("--disable-rewards-normalization", f"{kind} has no baseline of the group")
        else:
            draft.without(
                "--disable-rewards-normalization",
                f"algorithm.advantage.kind = {kind} always takes the group's mean off.",
            )


def kl(given: Given, draft: Draft) -> None:
    """slime has two coefficients: --kl-loss-coef acts with --use-kl-loss, --kl-coef with estimators per token."""
    in_loss, in_reward = given.has("--use-kl-loss"), _kl_in_reward(given, draft)
    kind = _KL_KINDS.get(given.text("--kl-loss-type", "k1"), given.text("--kl-loss-type"))
    words = "low_var_kl is k3, without slime's bound of 10" if given.text("--kl-loss-type") == "low_var_kl" else ""
    type_flags = ("--kl-loss-type",) if given.has("--kl-loss-type") else ()
    has_coef = bool(given.number("--kl-loss-coef", 0.0))
    if in_loss and has_coef:
        draft.set("algorithm.kl.coef", given.text("--kl-loss-coef"), "--use-kl-loss", "--kl-loss-coef")
        draft.set("algorithm.kl.kind", kind, *type_flags, words=words)
        if given.has("--use-unbiased-kl"):
            draft.set("algorithm.kl.unbiased", True, "--use-unbiased-kl")
    else:
        idle = "acts with --use-kl-loss and a --kl-loss-coef above 0 alone, in slime too."
        for flag in ("--use-kl-loss", "--kl-loss-coef"):
            if given.has(flag) and not has_coef:
                draft.same(flag, "algorithm.kl.coef is 0")
            elif given.has(flag):
                draft.without(flag, idle)
        if type_flags and in_reward:
            draft.set("algorithm.kl.kind", kind, *type_flags, words=words)
        elif type_flags:
            draft.without("--kl-loss-type", idle)
        if given.has("--use-unbiased-kl"):
            draft.without("--use-unbiased-kl", idle)
    if given.has("--ref-update-interval"):
        draft.set("algorithm.kl.refresh_steps", given.text("--ref-update-interval"), "--ref-update-interval")


def _kl_in_reward(given: Given, draft: Draft) -> bool:
    flag, advantage = "--kl-coef", _advantage(given)
    if not given.has(flag):
        return False
    if given.number(flag, 0.0) == 0:
        draft.same(flag, "algorithm.kl.coef is 0")
        return False
    if given.has("--use-kl-loss") and given.number("--kl-loss-coef", 0.0):
        draft.without(flag, "slime refuses it beside --kl-loss-coef.")
        return False
    if advantage == "group":
        ignored = f"slime's {_estimator(given)} does not read it, and " if _estimator(given) in _ESTIMATORS else ""
        draft.without(
            flag,
            f"{ignored}strop's group advantage takes no penalty per token. --use-kl-loss with --kl-loss-coef acts.",
        )
        return False
    draft.set("algorithm.kl.coef", given.text(flag), flag)
    draft.set("algorithm.kl.place", "reward", flag)
    if not given.has("--kl-loss-type"):
        draft.set("algorithm.kl.kind", "k1")
    return True


def corrections(given: Given, draft: Draft) -> None:
    """TIS, OPSM, and which log-probabilities the ratio divides by."""
    bounds = (("--tis-clip", "max_ratio"), ("--tis-clip-low", "min_ratio"))
    if given.has("--use-tis"):
        draft.set("algorithm.correction.kind", "truncate", "--use-tis")
    for flag, option in bounds:
        if given.has(flag) and given.has("--use-tis"):
            draft.set(f"algorithm.correction.{option}", given.text(flag), flag)
        elif given.has(flag):
            draft.without(flag, "acts with --use-tis alone, in slime too.")
    if given.has("--use-rollout-logprobs"):
        draft.set("algorithm.old_logprobs", "rollout", "--use-rollout-logprobs")
    if given.has("--use-opsm"):
        flags = ("--use-opsm", "--opsm-delta") if given.has("--opsm-delta") else ("--use-opsm",)
        draft.set("algorithm.opsm_delta", given.text("--opsm-delta", "1e-4"), *flags)
    elif given.has("--opsm-delta"):
        draft.without("--opsm-delta", "acts with --use-opsm alone, in slime too.")


def averages(given: Given, draft: Draft) -> None:
    """How the loss is averaged, and the entropy bonus."""
    if given.has("--calculate-per-token-loss"):
        draft.set("algorithm.reduction", "token_mean", "--calculate-per-token-loss")
    else:
        draft.set("algorithm.reduction", "sequence_mean", words="without --calculate-per-token-loss")
    if given.has("--entropy-coef"):
        draft.set("algorithm.entropy_coef", given.text("--entropy-coef"), "--entropy-coef")


def updates_per_batch(given: Given) -> int | None:
    """Optimizer steps of a batch of rollouts; None where the flags do not give a whole number."""
    if given.has("--num-steps-per-rollout"):
        return given.count("--num-steps-per-rollout")
    prompts, samples = given.count("--rollout-batch-size"), given.count("--n-samples-per-prompt", 1)
    size = given.count("--global-batch-size")
    if not given.has("--global-batch-size"):
        return 1
    if not (prompts and samples and size) or prompts * samples % size:
        return None
    return prompts * samples // size


def batch(given: Given, draft: Draft) -> None:
    """Prompts, samples, and how many updates a batch of them gives."""
    prompts, samples = "--rollout-batch-size", "--n-samples-per-prompt"
    if given.has(prompts):
        draft.set("rollout.prompts_per_step", given.text(prompts), prompts)
    draft.set("rollout.group_size", given.text(samples, "1"), *((samples,) if given.has(samples) else ()))
    flags = [flag for flag in ("--num-steps-per-rollout", "--global-batch-size") if given.has(flag)]
    updates = updates_per_batch(given)
    if flags and updates is None:
        product = f"{given.text(prompts, '?')} x {given.text(samples, '1')}"
        for flag in flags:
            draft.without(flag, f"does not divide the {product} sequences of a batch into a whole number of updates.")
    elif flags:
        product = f"{given.text(prompts, '?')} prompts x {given.text(samples, '1')} samples"
        words = f"{product} in {updates} updates; strop cuts them by prompts"
        draft.set("algorithm.updates_per_batch", updates, *flags, words=words)
    if Path(given.program).name == "train_async.py":
        draft.set("rollout.max_off_policy_steps", updates or 1, words="train_async.py samples a batch ahead")


RULES = {
    estimator: "--advantage-estimator --eps-clip --eps-clip-high --eps-clip-c",
    advantages: "--gamma --normalize-advantages --disable-grpo-std-normalization --disable-rewards-normalization",
    kl: "--use-kl-loss --kl-loss-coef --kl-loss-type --kl-coef --use-unbiased-kl --ref-update-interval",
    corrections: "--use-tis --tis-clip --tis-clip-low --use-rollout-logprobs --use-opsm --opsm-delta",
    averages: "--calculate-per-token-loss --entropy-coef",
    batch: "--rollout-batch-size --n-samples-per-prompt --global-batch-size --num-steps-per-rollout",
}
