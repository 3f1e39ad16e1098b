"""Rules of runs whose sampling is ahead of training: what makes up for it, and what does not go together with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from strop.config.base import Problem
from strop.config.engine import ServedEngineOptions, VLLMInProcessOptions
from strop.config.policy_loss import PolicyLossBase, PolicyLossOptions
from strop.config.sampling import FunctionRewardOptions
from strop.config.tree import variants

if TYPE_CHECKING:
    from strop.config.root import TrainConfig

AHEAD = "rollout.max_off_policy_steps"  # and the origin of what follows from it
_FOLLOW = ("algorithm.old_logprobs", "algorithm.correction.kind")


def default_correction(values: Mapping[str, Any], set_here: Mapping[str, str]) -> dict[str, str]:
    """What makes up for samples of an older policy where somebody samples ahead and says nothing of it.

    Args:
        values: of all tables, as they were merged.
        set_here: path of each option that somebody, or a preset, has set.

    Returns:
        Paths and values: the ratio to the sampler's own log-probabilities, or, for a loss without a ratio, or where
        `algorithm.veto_ratio` wants the trainer's, truncated weights.
    """
    ahead = str(_table(values, "rollout").get("max_off_policy_steps", 0))  # a flag's value is its text yet
    if not ahead.isdigit() or int(ahead) == 0:
        return {}
    if any(f"{path}.".startswith(("algorithm.old_logprobs.", "algorithm.correction.")) for path in set_here):
        return {}
    algorithm = _table(values, "algorithm")
    kind = _table(algorithm, "policy_loss").get("kind")
    without = [
        loss.model_fields["kind"].default
        for loss in variants(PolicyLossOptions)
        if issubclass(loss, PolicyLossBase) and not loss.has_ratio
    ]
    has_ratio = kind not in without
    if has_ratio and algorithm.get("veto_ratio") in (None, "none"):
        return {"algorithm.old_logprobs": "rollout"}
    return {"algorithm.correction.kind": "truncate"}


def _table(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = values.get(name, {})
    return table if isinstance(table, dict) else {}


def problems_beside(config: TrainConfig) -> Iterator[Problem]:
    """What a run that samples ahead cannot have."""
    rollout, algorithm, ahead = config.rollout, config.algorithm, config.rollout.max_off_policy_steps
    if ahead == 0:
        return
    beside, updates = f"with {AHEAD} = {ahead}", algorithm.updates_per_batch
    if ahead < updates:
        yield Problem(
            AHEAD,
            f"must be 0 or at least algorithm.updates_per_batch = {updates}, got {ahead}: one batch ahead is that many "
            "optimizer steps.",
        )
    if not _is_corrected(config):
        yield Problem(
            "algorithm.correction.kind",
            f"must be truncate or mask, or algorithm.old_logprobs rollout, {beside}, got none: the policy that learns from a "
            "sample is not the one that sampled it, and nothing would make up for that. Leave both out for the default.",
        )
    if rollout.from_folder is not None:
        yield Problem(AHEAD, f"must be 0 with rollout.from_folder, got {ahead}: nothing is sampled.")
    if config.filter.surplus == "keep":
        yield Problem(
            "filter.surplus",
            f"must be drop {beside}, got keep: groups that wait would be older than that. With rollout.streaming surplus "
            "groups join the next step by themselves, as long as they may.",
        )
    if isinstance(config.engine, ServedEngineOptions | VLLMInProcessOptions) and config.engine.sleep:
        yield Problem("engine.sleep", f"must be false {beside}, got true: the engine samples while the trainer works.")
    if config.run.profile_steps:
        yield Problem(
            "run.profile_steps",
            f"must be 0 {beside}, got {config.run.profile_steps}: torch's profiler sees one thread, and sampling and training "
            "have one each. Profile a run with 0 steps ahead.",
        )
    if rollout.streaming:
        yield from _of_streaming(config)


def _of_streaming(config: TrainConfig) -> Iterator[Problem]:
    engine, reward = config.engine, config.reward
    if isinstance(engine, ServedEngineOptions) and engine.pause_mode == "abort":
        modes = "keep or wait" if engine.kind == "vllm" else "retract or in_place"
        yield Problem(
            "engine.pause_mode",
            f"must be {modes} with rollout.streaming, got abort: new weights would cut responses, which would be scored as if "
            "the policy had ended them there.",
        )
    if config.rollout.num_scorers:
        yield Problem(
            "rollout.num_scorers",
            f"must be 0 with rollout.streaming, got {config.rollout.num_scorers}: scorers of a cluster are given the "
            "rollouts of a step at once, and here groups are scored as they come.",
        )
    if isinstance(reward, FunctionRewardOptions) and reward.batched:
        yield Problem(
            "reward.batched",
            "must be false with rollout.streaming, got true: groups are scored as they come, and never all of a step at once.",
        )


def _is_corrected(config: TrainConfig) -> bool:
    algorithm = config.algorithm
    has_ratio = algorithm.policy_loss.has_ratio and algorithm.old_logprobs == "rollout"
    return has_ratio or algorithm.correction.kind != "none"


def follows_from_ahead(path: str, origin: str) -> bool:
    """Was an option set by nobody but `default_correction`?"""
    return origin == AHEAD and path in _FOLLOW
