"""What an audit says of one option."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["acts", "idle", "refused", "one value", "cannot act here", "not tried", "DEAD"]
FAILURES: tuple[Verdict, ...] = ("DEAD", "not tried")


@dataclass(frozen=True)
class Finding:
    """What became of one option."""

    path: str
    value: Any
    origin: str
    verdict: Verdict
    tried: tuple[Any, ...] = ()
    changes: dict[str, str] = field(default_factory=dict)  # made by the last value tried
    reason: str = ""  # why it does not act, or why other values were not tried
    scenario: str = ""  # in which run it acted, if not in an ordinary one
    variant: str = ""  # the kind that its table was given for this, if not the config's own
