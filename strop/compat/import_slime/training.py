"""Rules for slime's flags of the model, the optimizer, checkpoints and micro-batches. Defaults are those of Megatron."""

from __future__ import annotations

from strop.compat.import_slime.draft import Draft, Given
from strop.compat.import_slime.objective import updates_per_batch

_OPTIMIZER = {  # flag -> option, default where it is not strop's
    "--lr": ("trainer.lr", None),
    "--lr-decay-style": ("trainer.lr_schedule", "linear"),
    "--weight-decay": ("trainer.weight_decay", "0.01"),
    "--adam-beta1": ("trainer.beta1", None),
    "--adam-beta2": ("trainer.beta2", "0.999"),
    "--adam-eps": ("trainer.adam_eps", None),
}


def model(given: Given, draft: Draft) -> None:
    """Which model, in which type."""
    if given.text("--hf-checkpoint"):
        draft.set("model.path", given.text("--hf-checkpoint"), "--hf-checkpoint")
    else:
        draft.missing("model.path", "model", "the script has no --hf-checkpoint: put your model's folder there")
        if given.has("--hf-checkpoint"):
            draft.without("--hf-checkpoint", "has no value.")
    draft.set("model.dtype", "bfloat16", *(("--bf16",) if given.has("--bf16") else ()))
    if given.has("--fp16"):
        draft.without("--fp16", "strop trains in float32 or bfloat16 (model.dtype).")


def optimizer(given: Given, draft: Draft) -> None:
    """AdamW and its schedule."""
    for flag, (option, default) in _OPTIMIZER.items():
        if given.has(flag):
            draft.set(option, given.text(flag), flag)
        elif default is not None:
            draft.set(option, default)
    if given.has("--optimizer"):
        if given.text("--optimizer") == "adam":
            draft.same("--optimizer", "the optimizer is AdamW")
        else:
            draft.without("--optimizer", "strop's optimizer is AdamW.")
    if given.has("--min-lr"):
        if given.number("--min-lr", 0) == 0:
            draft.same("--min-lr", "schedules end at 0")
        else:
            draft.without("--min-lr", "strop's schedules end at 0.")
    if given.has("--clip-grad"):
        is_off = given.number("--clip-grad", 1) == 0
        words = "0 switches it off in Megatron" if is_off else ""
        draft.set("trainer.max_grad_norm", "inf" if is_off else given.text("--clip-grad"), "--clip-grad", words=words)
    _warmup(given, draft)


def _warmup(given: Given, draft: Draft) -> None:
    iters, fraction = "--lr-warmup-iters", "--lr-warmup-fraction"
    if given.has(iters):
        draft.set("trainer.warmup_steps", given.text(iters), iters, words="both count optimizer steps")
    if not given.has(fraction):
        return
    part, batches, updates = given.number(fraction, 0), given.count("--num-rollout"), updates_per_batch(given)
    if given.has(iters):
        draft.without(fraction, "--lr-warmup-iters is used instead.")
    elif part is None or not batches or not updates:
        draft.without(fraction, "the number of optimizer steps is not known: set trainer.warmup_steps.")
    else:
        words = f"of {batches} batches x {updates} updates"
        draft.set("trainer.warmup_steps", int(part * batches * updates), fraction, words=words)


def checkpoints(given: Given, draft: Draft) -> None:
    """Where and how often a run is saved."""
    if given.has("--save"):
        draft.set("run.folder", given.text("--save"), "--save", words="checkpoints, metrics and the model lie there")
    if given.has("--save-interval"):
        draft.set("run.checkpoint_every_steps", given.text("--save-interval"), "--save-interval")
    retain = "--save-retain-interval"
    if given.has(retain) and given.has("--save-interval"):
        draft.set("run.keep_every_steps", given.text(retain), retain)
    elif given.has(retain):
        draft.without(retain, "acts with --save-interval alone, in slime too.")


def micro_batches(given: Given, draft: Draft) -> None:
    """slime's dynamic batches are what strop always makes."""
    flag, dynamic = "--max-tokens-per-gpu", "--use-dynamic-batch-size"
    if given.has(dynamic):
        draft.same(dynamic, "micro-batches are cut by tokens")
    if given.has(flag):
        if given.has(dynamic):
            draft.set("trainer.max_tokens_per_micro_batch", given.text(flag), flag)
        else:
            draft.without(flag, "acts with --use-dynamic-batch-size alone, in slime too.")


def recomputing(given: Given, draft: Draft) -> None:
    """Activations that are computed again: strop has whole layers, all of them, or none."""
    flags = [flag for flag in ("--recompute-granularity", "--gradient-checkpointing") if given.has(flag)]
    if flags:
        words = "slime computes the attention alone again" if given.text(flags[0]) == "selective" else ""
        draft.set("trainer.activation_checkpointing", "true", *flags, words=words)
    for flag in ("--recompute-method", "--recompute-num-layers", "--recompute-modules"):
        if given.has(flag):
            draft.without(flag, "strop computes every layer again, or none: trainer.activation_checkpointing.")


RULES = {
    model: "--hf-checkpoint --bf16 --fp16",
    optimizer: " ".join(_OPTIMIZER) + " --optimizer --min-lr --clip-grad --lr-warmup-iters --lr-warmup-fraction",
    checkpoints: "--save --save-interval --save-retain-interval",
    micro_batches: "--use-dynamic-batch-size --max-tokens-per-gpu",
    recomputing: "--recompute-granularity --gradient-checkpointing --recompute-method --recompute-num-layers "
    "--recompute-modules",
}
