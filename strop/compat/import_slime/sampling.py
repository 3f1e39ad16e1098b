"""Rules for slime's flags of prompts, sampling, rewards and evaluation."""

from __future__ import annotations

import math
import re
from typing import Any

from strop.compat.import_slime.distillation import learns_from_a_teacher_alone
from strop.compat.import_slime.draft import SECRET, Draft, Given
from strop.compat.import_slime.script import Flag

_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d*):(?P<end>-?\d*)\]")
_SET_NAME = re.compile(r"[^A-Za-z0-9_-]+")  # what the name of a set cannot hold
_SIMPLE = {
    "--rollout-temperature": "rollout.temperature",
    "--rollout-max-response-len": "rollout.max_response_tokens",
    "--num-rollout": "run.num_steps",
    "--rollout-seed": "seed",
    "--metadata-key": "data.metadata_key",
}
_RM_TYPES = {
    "math": "math-verify compares the final answers; slime's math wants them in a box",
    "deepscaler": "math-verify compares the final answers; slime's deepscaler also wants the end of a thought before it",
    "dapo": "math-verify compares the final answers and a wrong one earns 0, not -1",
}


def rollout(given: Given, draft: Draft) -> None:
    """How a batch is sampled."""
    for flag, option in _SIMPLE.items():
        if given.has(flag):
            draft.set(option, given.text(flag), flag)
    if not given.has("--rollout-seed"):
        draft.set("seed", 42)
    for flag, off in (("--rollout-top-p", "1"), ("--rollout-top-k", "-1")):
        if given.has(flag) and given.number(flag, 0) == float(off):
            draft.same(flag, "training samples from the whole distribution")
        elif given.has(flag):
            draft.without(
                flag, "strop trains on samples from the whole distribution; evaluation has eval.top_p and eval.top_k."
            )
    if given.has("--rollout-stop-token-ids"):
        ids = given.flags["--rollout-stop-token-ids"].values
        draft.set("rollout.stop_token_ids", list(ids), "--rollout-stop-token-ids")
    if given.has("--rollout-skip-special-tokens"):
        draft.same("--rollout-skip-special-tokens", "scorers see the response without special tokens")
    if given.has("--num-epoch"):
        draft.without(
            "--num-epoch",
            "slime ignores it beside --num-rollout."
            if given.has("--num-rollout")
            else "strop counts batches, not passes over the data: set run.num_steps.",
        )
    if given.has("--seed"):
        draft.without("--seed", "strop has one seed, which --rollout-seed gives.")


def prompts(given: Given, draft: Draft) -> None:
    """Where prompts come from, and what is done to them."""
    if given.has("--prompt-data"):
        _source("data", given.text("--prompt-data"), "--prompt-data", draft)
    else:
        draft.missing("data.kind", "jsonl", "")
        draft.missing("data.path", "prompts.jsonl", "the script has no --prompt-data: put your file there")
    _columns("data", given, draft, {"prompt_key": ("--input-key",), "label_key": ("--label-key",)})
    flags = ("--rollout-shuffle",) if given.has("--rollout-shuffle") else ()
    draft.set("data.shuffle", bool(flags), *flags)


def _source(table: str, path: str, flag: str, draft: Draft) -> None:
    match = _SLICE.fullmatch(path)
    plain = match["path"] if match else path
    draft.set(f"{table}.kind", "parquet" if plain.endswith(".parquet") else "jsonl", flag)
    draft.set(f"{table}.path", plain, flag)
    if match and match["start"] in ("", "0") and match["end"].isdecimal():
        draft.set(f"{table}.max_prompts", match["end"], flag)
    elif match:
        draft.without(flag, f"{table}.max_prompts takes the first rows alone: all rows of {plain} are used.")


def _columns(table: str, given: Given, draft: Draft, flags_of: dict[str, tuple[str, ...]]) -> None:
    """Keys of the prompt, slime's default "input", and of the label; whether there is a chat template."""
    for name, flags in flags_of.items():
        flag = next((flag for flag in flags if given.has(flag)), None)
        if flag is not None:
            draft.set(f"{table}.{name}", given.text(flag), flag)
        elif name == "prompt_key":
            draft.set(f"{table}.{name}", "input")
    template = "--apply-chat-template"
    if given.has(template):
        draft.set(f"{table}.chat", "always", template)
    else:
        draft.set(f"{table}.chat", "never", words=f"without {template}")


def reward(given: Given, draft: Draft) -> None:
    """A function of the user's, or one of slime's own scorers."""
    path, kind = given.text("--custom-rm-path"), given.text("--rm-type")
    scorer = kind.removeprefix("boxed_")
    if learns_from_a_teacher_alone(given):
        _of_a_teacher(given, draft)
    elif path:
        _function(given, draft, path)
    elif scorer in _RM_TYPES:
        draft.set("reward.kind", "math", "--rm-type", words=_RM_TYPES[scorer])
    else:
        _yours(draft, "the config needs a scorer")
    if given.has("--rm-type") and path:
        draft.without("--rm-type", "slime uses --custom-rm-path instead.")
    elif given.has("--rm-type") and scorer not in _RM_TYPES:
        draft.without(
            "--rm-type", f"strop has no scorer {kind or 'without a name'}; reward.function stands for one of yours."
        )
    if given.has("--custom-rm-path") and not path:
        draft.without("--custom-rm-path", "has no value.")
    if not path:
        for flag in ("--reward-key", "--group-rm", "--rm-url"):
            if given.has(flag):
                draft.without(flag, "strop reads it for --custom-rm-path alone.")


def _yours(draft: Draft, why: str) -> None:
    draft.missing("reward.kind", "slime", "")
    draft.missing("reward.function", "my_reward.py:score", f"{why}: write `async def score(args, sample)` there")


def _of_a_teacher(given: Given, draft: Draft) -> None:
    """slime's reward that is no score; an evaluation still needs one."""
    flags = ("--custom-rm-path", *(("--rm-url",) if given.has("--rm-url") else ()))
    if given.text("--opd-type") not in ("sglang", "megatron") or given.has("--eval-prompt-data"):
        for flag in flags:
            draft.without(flag, "asks slime's teacher and scores nothing.")
        _yours(draft, "evaluations need a scorer" if given.has("--eval-prompt-data") else "the config needs a scorer")
    else:
        draft.set("reward.kind", "none", *flags, words="it asks the teacher, and every reward is 0")
    for flag in ("--reward-key", "--group-rm"):
        if given.has(flag):
            draft.without(flag, "the reward is no score.")


def _function(given: Given, draft: Draft, path: str) -> None:
    flag, (module, _, name) = "--custom-rm-path", path.rpartition(".")
    is_path = ":" in path or not module
    draft.set("reward.kind", "slime", flag)
    draft.set("reward.function", path if is_path else f"{module}:{name}", flag)
    if given.has("--group-rm"):
        draft.set("reward.batched", True, "--group-rm")
    if given.has("--reward-key"):
        draft.set("reward.reward_key", given.text("--reward-key"), "--reward-key")
    flags = (flag, "--rm-url") if given.has("--rm-url") else (flag,)
    draft.set("reward.args", _attributes(given), *flags, words="all flags, for the function to read")


_EQUAL_REWARDS = "check_reward_nonzero_std"


def filters(given: Given, draft: Draft) -> None:
    """Dynamic sampling: which groups stay, and how many prompts are sampled at once."""
    flag, more = "--dynamic-sampling-filter-path", "--over-sampling-batch-size"
    path = given.text(flag)
    module, _, name = path.rpartition(".")
    if name == _EQUAL_REWARDS and module.endswith("dynamic_sampling_filters"):
        draft.set("filter.equal_rewards", True, flag, words="slime's own filter")
    elif path:
        draft.set("filter.group", path if ":" in path or not module else f"{module}:{name}", flag)
        draft.set("filter.group_kind", "slime", flag)
        draft.set("filter.group_args", _attributes(given), flag, words="all flags, for the function to read")
    elif given.has(flag):
        draft.without(flag, "has no value.")
    if given.has(more):
        draft.set("rollout.prompts_per_round", given.text(more), more)


def _attributes(given: Given) -> dict[str, Any]:
    """args.NAME for every flag of the script but credentials."""
    found = {name[2:].replace("-", "_"): _typed(flag) for name, flag in given.flags.items() if name not in SECRET}
    for flag, name in (
        ("disable_grpo_std_normalization", "grpo_std_normalization"),
        ("disable_rewards_normalization", "rewards_normalization"),
    ):
        if found.pop(flag, None) is not None:
            found[name] = False
    return found


def _typed(flag: Flag) -> Any:
    values = [_number(text) for text in flag.values]
    return True if not values else values[0] if len(values) == 1 else values


def _number(text: str) -> Any:
    """A number where it is one that a file can hold, else the text."""
    try:
        value = float(text)
    except ValueError:
        return text
    if not math.isfinite(value) or abs(value) >= 2**63:
        return text
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else value


_ANSWERS = {  # what follows --eval- and --rollout- -> option, slime's default
    "temperature": ("eval.temperature", "1.0"),
    "top-p": ("eval.top_p", "1.0"),
    "top-k": ("eval.top_k", "-1"),
}


def evaluation(given: Given, draft: Draft) -> None:
    """Held-out prompts; what slime does not set for them is as in training."""
    names = "--eval-prompt-data"
    words = given.flags[names].values if given.has(names) else ()
    for table, path in _held_out(words, draft):
        _source(table, path, names, draft)
        keys = {"prompt_key": ("--eval-input-key", "--input-key"), "label_key": ("--eval-label-key", "--label-key")}
        _columns(table, given, draft, keys)
    if given.has(names) and not words:
        draft.without(names, "names no file.")
    for flag in ("--eval-input-key", "--eval-label-key"):
        if given.has(flag) and not words:
            draft.without(flag, "cannot act without --eval-prompt-data.")
    if given.has("--skip-eval-before-train"):
        draft.set("eval.at_start", False, "--skip-eval-before-train")
    if given.has("--eval-interval"):
        draft.set("eval.every_steps", given.text("--eval-interval"), "--eval-interval")
    if given.has("--eval-max-response-len"):
        draft.set("eval.max_response_tokens", given.text("--eval-max-response-len"), "--eval-max-response-len")
    if given.has("--eval-temperature") and given.number("--eval-temperature", 1.0) == 0:
        _greedy(given, draft)
    else:
        _sampled(given, draft, has_data=bool(words))


def _held_out(words: tuple[str, ...], draft: Draft) -> list[tuple[str, str]]:
    """Table and file of each set: `name path name path ...`; of a single one eval.data, whose metrics have no name."""
    if len(words) <= 2:
        return [("eval.data", words[-1])] if words else []
    if len(words) % 2:
        draft.without("--eval-prompt-data", f"takes a name before each file: {words[-1]} is left out.")
    pairs = zip(words[0:-1:2], words[1::2], strict=True)
    return [(f"eval.sets.{_SET_NAME.sub('-', name)}.data", path) for name, path in pairs]


def _greedy(given: Given, draft: Draft) -> None:
    draft.set("eval.greedy", True, "--eval-temperature", words="temperature 0 is greedy")
    draft.set("eval.num_samples", 0, "--eval-temperature")
    for flag in ("--n-samples-per-eval-prompt", "--eval-top-p", "--eval-top-k"):
        if given.has(flag):
            draft.without(flag, "cannot act: greedy answers to one prompt are all the same.")


def _sampled(given: Given, draft: Draft, *, has_data: bool) -> None:
    """How held-out answers are sampled: --eval-X, or else --rollout-X."""
    if has_data:
        draft.set("eval.greedy", False, words="slime samples its answers")
    if given.has("--n-samples-per-eval-prompt"):
        draft.set("eval.num_samples", given.text("--n-samples-per-eval-prompt"), "--n-samples-per-eval-prompt")
    for name, (option, default) in _ANSWERS.items():
        flag = f"--eval-{name}"
        value = given.text(flag, given.text(f"--rollout-{name}", default))
        value = "0" if value == "-1" and name == "top-k" else value
        if given.has(flag):
            draft.set(option, value, flag)
        elif has_data:
            draft.set(option, value, words=f"as --rollout-{name}")


RULES = {
    rollout: " ".join(_SIMPLE)
    + " --rollout-top-p --rollout-top-k --rollout-stop-token-ids --rollout-skip-special-tokens "
    "--num-epoch --seed",
    prompts: "--prompt-data --input-key --label-key --apply-chat-template --rollout-shuffle",
    reward: "--rm-type --custom-rm-path --reward-key --group-rm --rm-url",
    filters: "--dynamic-sampling-filter-path --over-sampling-batch-size",
    evaluation: "--eval-prompt-data --eval-interval --skip-eval-before-train --n-samples-per-eval-prompt "
    "--eval-input-key --eval-label-key "
    "--eval-temperature --eval-top-p --eval-top-k --eval-max-response-len",
}
