"""Rules for slime's flags of the critic, which only --advantage-estimator ppo has."""

from __future__ import annotations

from strop.compat.import_slime.draft import Draft, Given

_FLAGS = {  # flag -> option, what is said of it
    "--lambd": ("algorithm.advantage.lam", ""),
    "--value-clip": ("critic.eps_clip_value", ""),
    "--num-critic-only-steps": ("critic.only_first_steps", ""),
    "--critic-lr": ("critic.lr", ""),
    "--critic-lr-warmup-iters": ("critic.warmup_steps", "both count optimizer steps"),
    "--critic-load": ("critic.path", "a Hugging Face folder, where slime's is a checkpoint of Megatron"),
}
# Megatron gives both models one optimizer's settings; in strop the critic has a table of its own.
_SHARED = ("lr", "lr_schedule", "weight_decay", "beta1", "beta2", "adam_eps", "max_grad_norm")


def critic(given: Given, draft: Draft) -> None:
    """The critic's own flags, and those of the optimizer, which slime's critic shares with the policy."""
    if given.text("--advantage-estimator") != "ppo":
        for flag in (*_FLAGS, "--critic-save"):
            if given.has(flag):
                draft.without(flag, "acts with --advantage-estimator ppo alone, in slime too.")
        return
    policy = {row.option: row for row in draft.rows}
    for name in _SHARED:
        row = policy.get(f"trainer.{name}")
        if row is not None:
            draft.set(f"critic.{name}", row.value, *row.flags, words="slime's critic has the policy's")
    for flag, (option, words) in _FLAGS.items():
        if given.has(flag):
            draft.set(option, given.text(flag), flag, words=words)
    if given.has("--critic-save"):
        draft.same("--critic-save", "the critic lies in the run folder, in its checkpoints and at the end in critic/")


RULES = {critic: " ".join(_FLAGS) + " --critic-save"}
