"""The best step of a run, by one metric of its evaluations, and the model of that step."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strop.runtime.models import has_finite_weights

if TYPE_CHECKING:
    from strop.runtime.session import Session

_FILE = "best.json"  # in best/


@dataclass(frozen=True)
class Best:
    """The evaluation with the highest value of `metric` so far; of equal ones the earliest."""

    step: int
    metric: str
    value: float


def take_best(session: Session) -> None:
    """Compare the newest evaluation with the best one, and keep the model if it is better."""
    found = session.evaluations[-1]
    metric = session.config.eval.deciding_metric
    value = found.metrics()[metric]
    if math.isnan(value) or (session.best is not None and value <= session.best.value):
        return
    session.best = Best(found.step, metric, value)
    if session.config.eval.keep_best and has_finite_weights(session.loaded.model):
        session.folder.write_best(
            session.loaded.model, session.loaded.tokenizer, {_FILE: json.dumps(asdict(session.best))}
        )


def restore_best(session: Session, state: dict[str, object] | None) -> None:
    """Take the best step back from a checkpoint; if another metric decides now, earlier steps are not compared."""
    config = session.config
    if state is None or not config.eval.all_sets:
        return
    before = Best(**state)  # type: ignore[arg-type]  # as it was written
    if before.metric == config.eval.deciding_metric:
        session.best = before
        return
    session.console.warn(
        f"eval.best is {config.eval.deciding_metric} and was {before.metric}: the best step is sought from step "
        f"{session.step} on."
    )


def best_line(session: Session) -> str:
    """What the end of a run says of its best step; nothing where there was no evaluation."""
    best = session.best
    if best is None:
        return ""
    kept = f", kept in {session.folder.best}" if kept_step(session.folder.best) == best.step else ""
    return f"best step: {best.step} of {session.step} with {best.metric} = {best.value:.4g}{kept}"


def kept_step(folder: Path) -> int | None:
    """The step whose model lies in best/; None where none does."""
    try:
        return int(json.loads((folder / _FILE).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
