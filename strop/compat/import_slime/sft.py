"""Rules for a launch of slime that fine-tunes (--loss-type sft_loss): it becomes a config of strop sft."""

from __future__ import annotations

from strop.compat.import_slime.draft import Draft, Given
from strop.compat.import_slime.objective import updates_per_batch

_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"
_MASK_TYPES = ("qwen", "qwen3", "qwen3_5", "distill_qwen")
_IMPLIED = {
    "--disable-compute-advantages-and-returns": "strop sft has no advantages",
    "--debug-train-only": "strop sft starts no sampler",
    "--n-samples-per-prompt": "a demonstration is learned once a pass",
}


def is_sft(given: Given) -> bool:
    """Whether a launch fine-tunes on demonstrations."""
    return given.text("--loss-type") == "sft_loss" or given.text("--rollout-function-path") == _ROLLOUT


def kind_of_run(given: Given, draft: Draft) -> None:
    """What says that it is fine-tuning, and what follows from that."""
    for flag, value, words in (
        ("--loss-type", "sft_loss", "strop sft has this loss"),
        ("--rollout-function-path", _ROLLOUT, "strop sft reads demonstrations"),
    ):
        if given.text(flag) == value:
            draft.same(flag, words)
        elif given.has(flag):
            draft.without(
                flag, "the other flags say that this is fine-tuning, and strop sft has one loss and no sampler."
            )
    for flag, words in _IMPLIED.items():
        if given.has(flag):
            draft.same(flag, words)
    flag = "--loss-mask-type"
    if given.text(flag) in _MASK_TYPES:
        draft.same(flag, "masks follow from the tokenizer's chat template, whatever the model")
    elif given.has(flag):
        draft.without(flag, "strop's masks follow from the tokenizer's chat template.")


def demonstrations(given: Given, draft: Draft) -> None:
    """The conversations, which slime calls prompts, and their order."""
    path = given.text("--prompt-data")
    if path:
        plain, _, slice_ = path.partition("@[")
        draft.set("data.kind", "parquet" if plain.endswith(".parquet") else "jsonl", "--prompt-data")
        draft.set("data.path", plain, "--prompt-data")
        start, _, end = slice_.removesuffix("]").partition(":")
        if slice_ and start in ("", "0") and end.isdecimal():
            draft.set("data.max_rows", end, "--prompt-data")
        elif slice_:
            draft.without("--prompt-data", f"data.max_rows takes the first rows alone: all rows of {plain} are used.")
    else:
        draft.missing(
            "data.path", "demonstrations.jsonl", "the script has no --prompt-data: put your file of conversations there"
        )
        if given.has("--prompt-data"):
            draft.without("--prompt-data", "has no value.")
    flags = ("--input-key",) if given.has("--input-key") else ()
    draft.set("data.messages_key", given.text("--input-key", "input"), *flags)
    flags = ("--rollout-shuffle",) if given.has("--rollout-shuffle") else ()
    draft.set("data.shuffle", bool(flags), *flags)
    if given.has("--apply-chat-template"):
        draft.same("--apply-chat-template", "conversations always go through the chat template")
    for flag in ("--label-key", "--metadata-key"):
        if given.has(flag):
            draft.without(flag, "strop sft reads the conversation alone.")


def batches(given: Given, draft: Draft) -> None:
    """How many demonstrations a step takes, how many steps there are, and the average of the loss."""
    size = "--global-batch-size" if given.has("--global-batch-size") else "--rollout-batch-size"
    if given.has(size):
        draft.set("data.batch_size", given.text(size), size)
    other = "--rollout-batch-size"
    if size != other and given.text(other) == given.text(size):
        draft.same(other, "a batch of demonstrations is one optimizer step")
    elif size != other and given.has(other):
        draft.without(other, "a step of strop sft takes its demonstrations itself; --global-batch-size says how many.")
    count, updates = given.count("--num-rollout"), updates_per_batch(given)
    if given.has("--num-rollout"):
        steps = given.text("--num-rollout") if count is None or updates is None else count * updates
        draft.set("run.num_steps", steps, "--num-rollout")
    if given.has("--num-epoch") and given.has("--num-rollout"):
        draft.without("--num-epoch", "slime ignores it beside --num-rollout.")
    elif given.has("--num-epoch"):
        draft.set("run.num_epochs", given.text("--num-epoch"), "--num-epoch")
    if given.has("--num-steps-per-rollout"):
        draft.without("--num-steps-per-rollout", "a batch of demonstrations is one optimizer step.")
    flag = "--calculate-per-token-loss"
    if given.has(flag):
        draft.set("loss.reduction", "token_mean", flag)
    else:
        draft.set("loss.reduction", "sequence_mean", words=f"without {flag}")
    flags = ("--rollout-seed",) if given.has("--rollout-seed") else ()
    draft.set("seed", given.text("--rollout-seed", "42"), *flags)
    if given.has("--seed"):
        draft.without("--seed", "strop has one seed, which --rollout-seed gives.")


RULES = {
    kind_of_run: "--loss-type --rollout-function-path --loss-mask-type " + " ".join(_IMPLIED),
    demonstrations: "--prompt-data --input-key --rollout-shuffle --apply-chat-template --label-key --metadata-key",
    batches: "--global-batch-size --rollout-batch-size --num-rollout --num-epoch --num-steps-per-rollout "
    "--calculate-per-token-loss --rollout-seed --seed",
}
