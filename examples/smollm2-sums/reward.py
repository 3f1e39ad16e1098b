"""A shaped reward: 0.2 for a bare number and then the end, up to 0.4 more the nearer it is, and 1 for the right sum."""

from strop.types import Rollout


def score(rollout: Rollout) -> float:
    answer, label = rollout.text.strip(), int(rollout.prompt.label)
    if rollout.finish_reason != "stop" or not answer.isdecimal():
        return 0.0
    distance = abs(int(answer) - label)
    return 1.0 if distance == 0 else 0.2 + 0.4 * max(0.0, 1 - distance / 10)
