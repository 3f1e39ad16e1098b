"""The best step of a run, by one metric of its evaluations, and the model of that step."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strop.config.tree import values
from strop.runtime.differences import is_of_scorer
from strop.runtime.models import has_finite_weights

if TYPE_CHECKING:
    from strop.runtime.session import Session

_FILE = "best.json"  # in best/
# When an evaluation is made, and what becomes of it, changes none of its values.
_FREE = ("eval.every_steps", "eval.at_start", "eval.keep_best", "eval.best")


@dataclass(frozen=True)
class Best:
    """The evaluation with the highest value of `metric` so far; of equal ones the earliest."""

    step: int
    metric: str
    value: float
    measured_on: str = ""  # fingerprint of the prompts and options that the metric was measured with


def take_best(session: Session) -> None:
    """Compare the newest evaluation with the best one, and keep the model if it is better."""
    found = session.evaluations[-1]
    metric = session.config.eval.deciding_metric
    value = found.metrics().get(metric)
    if value is None:
        session.console.warn(
            f"{metric} cannot be measured after step {found.step}: too few answers have a reward. The step is not compared "
            "with others."
        )
        return
    if session.best is not None and value <= session.best.value:
        return
    session.best = Best(found.step, metric, value, _measure(session))
    if session.config.eval.keep_best and has_finite_weights(session.loaded.model):
        session.folder.write_best(
            session.loaded.model,
            session.loaded.tokenizer,
            {_FILE: json.dumps({"step": found.step, "metric": metric, "value": value})},
        )


def restore_best(session: Session, state: dict[str, object] | None) -> None:
    """Take the best step back from a checkpoint; if another metric decides now, earlier steps are not compared."""
    config = session.config
    if state is None or not config.eval.all_sets:
        return
    before = Best(**state)  # type: ignore[arg-type]  # as it was written
    if before.metric == config.eval.deciding_metric and before.measured_on == _measure(session):
        session.best = before
        return
    if before.metric == config.eval.deciding_metric:
        session.console.warn(
            f"{before.metric} is measured otherwise than before (other prompts, reward or sampling): the best step is sought "
            f"from step {session.step} on."
        )
        return
    session.console.warn(
        f"eval.best is {config.eval.deciding_metric} and was {before.metric}: the best step is sought from step "
        f"{session.step} on."
    )


def _measure(session: Session) -> str:
    """What a value of the deciding metric depends on beside the model."""
    options = values(session.config)
    kept = {
        path: value
        for path, value in options.items()
        if path.startswith(("eval.", "reward.")) and path not in _FREE and not is_of_scorer(path, options)
    }
    digest = hashlib.sha256(repr(sorted(kept.items())).encode())
    for held_out in session.held_out:
        for prompt in held_out.prompts:
            digest.update(repr((held_out.name, prompt.tokens, prompt.label)).encode())
    return digest.hexdigest()[:16]


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
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
