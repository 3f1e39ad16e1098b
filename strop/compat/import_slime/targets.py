"""What a launch becomes: a config of strop train or of strop sft, each by rules of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from strop.compat.import_slime import critic, distillation, engine, objective, sampling, sft, training
from strop.compat.import_slime.draft import Draft, Given
from strop.compat.import_slime.script import Flag, Script
from strop.compat.import_slime.without import WITHOUT, reason_without
from strop.config import SFTConfig, TrainConfig

RULES = {
    rule: tuple(flags.split())
    for room in (training, sampling, objective, critic, distillation, engine)
    for rule, flags in room.RULES.items()
}
MAPPED = tuple(flag for flags in RULES.values() for flag in flags)
KNOWN = (*MAPPED, *WITHOUT)
_OF_REINFORCEMENT = "is of sampling, rewards or reinforcement learning, which strop sft has none of."
_SWITCHES = """--use-kl-loss --use-unbiased-kl --use-opd --normalize-advantages --disable-grpo-std-normalization --use-tis
    --disable-rewards-normalization --use-rollout-logprobs --use-opsm --calculate-per-token-loss --apply-chat-template
    --rollout-shuffle --group-rm --use-dynamic-batch-size --rollout-skip-special-tokens --bf16 --fp16
    --skip-eval-before-train --rollout-external""".split()  # noqa: SIM905
_TAKE_MANY = frozenset(("--eval-prompt-data", "--rollout-stop-token-ids", "--rollout-external-engine-addrs"))


@dataclass(frozen=True)
class Target:
    """A command, the tree of its options, and the rules by which flags become options."""

    command: Literal["train", "sft"]
    root: type[TrainConfig] | type[SFTConfig]
    rules: dict[Callable[[Given, Draft], None], tuple[str, ...]]

    @property
    def mapped(self) -> set[str]:
        return {flag for flags in self.rules.values() for flag in flags}

    def reason_without(self, flag: str) -> str:
        """Why a flag has no counterpart in the command's options."""
        is_of_training = self.command == "sft" and flag in MAPPED and flag not in WITHOUT
        return _OF_REINFORCEMENT if is_of_training else reason_without(flag)


TRAIN = Target("train", TrainConfig, RULES)
SFT = Target("sft", SFTConfig, {r: tuple(f.split()) for room in (training, sft) for r, f in room.RULES.items()})
SFT_MAPPED = tuple(flag for flags in SFT.rules.values() for flag in flags)


def target_of(given: Given) -> Target:
    """Which command does what a launch does."""
    return SFT if sft.is_sft(given) else TRAIN


def purpose_of(given: Given, script: Script, name: str) -> str:
    """What a script is for, in words."""
    launch = f"({script.program}, line {script.line})"
    if target_of(given) is SFT:
        return f"{name} is fine-tuning on demonstrations {launch}."
    return f"{name} is reinforcement learning with {given.text('--advantage-estimator', 'grpo')} {launch}."


def most_words(flag: Flag) -> int:
    """How many words belong to a flag."""
    return 0 if flag.name in _SWITCHES else len(flag.words) if flag.name in _TAKE_MANY else 1
