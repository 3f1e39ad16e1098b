"""The gradient's support: which tokens can move the policy, in words."""

from __future__ import annotations

from strop.algorithms.variants import POLICY_LOSSES
from strop.config import TrainConfig

# Advantages that are exactly 0 where all rewards of a group are equal.
_NOTHING_IN_EQUAL_GROUPS = ("group", "rloo", "opo", "maxrl", "pass_at_k")


def support_lines(config: TrainConfig) -> list[str]:
    """What the policy wrote, less what the options keep from moving it."""
    algorithm = config.algorithm
    ended = ", in responses that ended by themselves" if algorithm.mask_truncated else ""
    lines = [f"  gradient from every token that the policy wrote{ended}"]
    exceptions = _without_policy_loss(config)
    lines += [f"    {'in loss_t, none' if place == 0 else 'nor'} {words}" for place, words in enumerate(exceptions)]
    added = [name for name, is_there in _added_terms(config) if is_there]
    if added:
        lines.append(f"    {' and '.join(added)} pull{'s' if len(added) == 1 else ''} at these too")
    if not algorithm.ratio_moves and POLICY_LOSSES[algorithm.policy_loss.kind].no_gradient_where:
        lines.append("    every ratio is 1 in the only update of a batch, within all bounds")
    return lines


def _without_policy_loss(config: TrainConfig) -> list[str]:
    """Where the policy loss, with what multiplies it, has no gradient."""
    algorithm, found = config.algorithm, []
    condition = POLICY_LOSSES[algorithm.policy_loss.kind].no_gradient_where
    if condition is not None and algorithm.ratio_moves:
        found.append(f"where {condition(algorithm.policy_loss)}")
    equal_groups = algorithm.advantage.kind in _NOTHING_IN_EQUAL_GROUPS and not algorithm.whiten_advantages
    if equal_groups and not config.distillation.is_on:
        found.append("where A = 0, as in a group whose rewards are equal")
    else:
        found.append("where A = 0")
    if algorithm.correction.kind == "mask":
        found.append("where the correction's weight is 0")
    if algorithm.veto_ratio is not None or algorithm.opsm_delta is not None:
        found.append("in a sequence that is set to 0 above")
    return found


def _added_terms(config: TrainConfig) -> list[tuple[str, bool]]:
    algorithm = config.algorithm
    return [
        ("kl_t", algorithm.kl.coef > 0 and algorithm.kl.place == "loss"),
        ("in right answers the likelihood", algorithm.likelihood_coef > 0),
        ("entropy_t", algorithm.entropy_coef != 0 or algorithm.entropy_target is not None),
    ]
