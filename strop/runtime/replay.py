"""`strop replay` as a function: redo a step of a run from its recorded rollouts, and compare it bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from strop.config import EvalOptions, TrainConfig
from strop.data import Batch
from strop.observe.console import Console, QuietConsole
from strop.observe.metrics_file import read_metrics
from strop.observe.rollout_file import step_files
from strop.runtime.checkpoints import checkpoint_until
from strop.runtime.differences import allowed_differences
from strop.runtime.from_rollouts import RecordedRollouts
from strop.runtime.loop import make_step
from strop.runtime.rank import serve_if_asked
from strop.runtime.recording import digests, recorded_weights
from strop.runtime.resume import restore_learners
from strop.runtime.run_folder import RunFolder
from strop.runtime.session import Session, open_session
from strop.types import ConfigError, GuardError, Rollout, UserError


@dataclass(frozen=True)
class TokenRow:
    """A token of a rollout as its update saw it, before it was made."""

    token: int
    text: str
    is_trained: bool
    rollout_logprob: float
    old_logprob: float
    logprob: float
    advantage: float
    weight: float
    loss: float

    @property
    def ratio(self) -> float:
        """Of the policy to the old policy."""
        return math.exp(min(self.logprob - self.old_logprob, 700.0))


@dataclass
class Replayed:
    """What redoing a step found."""

    step: int
    start: str  # what it began from, in words
    then: dict[str, float] = field(default_factory=dict)  # the step's metrics as recorded
    now: dict[str, float] = field(default_factory=dict)  # and as they came out
    weights: dict[str, str] = field(default_factory=dict)  # checksums after the step
    difference: str = ""  # the first one, in words; empty where everything is the same
    refusal: str = ""  # what a guard said that stopped the run at this step
    rollout: Rollout | None = None  # that was asked for
    tokens: list[TokenRow] = field(default_factory=list)  # of it; none where it did not enter the loss


def replay(
    run: Path, config: TrainConfig, *, step: int, rollout: int | None = None, console: Console | None = None
) -> Replayed:
    """Redo the steps from the newest checkpoint before `step` (or the run's first model) up to it.

    Args:
        run: the run folder, which is left as it is.
        config: that of the run.
        step: counted from 1.
        rollout: a line of the step's file, counted from 1, whose tokens are to be shown.
        console: where progress goes.

    Raises:
        UserError: the run did not record what this takes, or it is another model.
    """
    serve_if_asked(config.trainer)
    folder, console = RunFolder(run), console or QuietConsole()
    files = dict(step_files(folder.guards)) | dict(step_files(folder.rollouts))
    weights = recorded_weights(folder.rollouts)
    _check_recorded(folder, files, weights, step)
    asked = config.model_copy(update={"eval": EvalOptions()})
    with closing(open_session(asked, console, folder, replays=True)) as session:
        return _replayed(session, files, weights, step, rollout)


def _replayed(
    session: Session,
    files: Mapping[int, Path],
    weights: Mapping[int, Mapping[str, str]],
    step: int,
    rollout: int | None,
) -> Replayed:
    folder, start = session.folder, _go_to_start(session, step)
    needed = {n: files[n] for n in range(session.step + 1, step + 1) if n in files}
    missing = [n for n in range(session.step + 1, step) if n not in needed]
    if missing:
        raise UserError(
            f"{folder.rollouts} must have the rollouts of every step from {start} on, got none of step {missing[0]}."
        )
    recorded = RecordedRollouts(needed, prompts_per_step=session.config.rollout.prompts_per_step)
    recorded.check(session.loaded.model)
    found = Replayed(step, start)
    found.difference = _weights_differ(session, weights)
    then = {int(row["step"]): row for row in read_metrics(folder.metrics)}
    while session.step < step and not found.refusal:
        _redo(session, recorded, found, then, weights, rollout if session.step + 1 == step else None)
    return found


def _check_recorded(
    folder: RunFolder, files: Mapping[int, Path], weights: Mapping[int, Mapping[str, str]], step: int
) -> None:
    if step not in files:
        has = f"steps {min(files)} to {max(files)}" if files else "no step"
        raise UserError(f"--step must be a step whose rollouts are in {folder.rollouts}, got {step}: it has {has}.")
    if not weights:
        raise UserError(
            f"{folder.rollouts} must have the checksums of the weights to compare with, in weights.jsonl: record with "
            "run.save_rollouts = true and run.rollout_form = whole."
        )


def _go_to_start(session: Session, step: int) -> str:
    """Bring a new session to the newest checkpoint before the step; says where it is then."""
    found = checkpoint_until(session.folder.checkpoints, warn=session.console.warn, until=step - 1)
    if found is None:
        return "the model that the run began with"
    path, state = found
    try:
        allowed_differences(session.config, state["config"], frozenset())
    except (
        ConfigError
    ) as error:  # somebody tries another setting on the same rollouts: the verdict will say what came of it
        session.console.warn(f"the run had other options: {error}")
    restore_learners(session, path, state)
    if "guards" in state:
        session.guards.load_state(state["guards"])
    session.step = state["step"]
    return f"checkpoint {path.name}"


def _redo(
    session: Session,
    recorded: RecordedRollouts,
    found: Replayed,
    then: Mapping[int, Mapping[str, float]],
    weights: Mapping[int, Mapping[str, str]],
    line: int | None,
) -> None:
    """The next step. What differs is noted, the first difference alone."""
    step = session.step + 1
    rollouts = recorded.of_step(step)
    chosen = None if line is None else _chosen(rollouts, line, recorded.files[step])
    found.rollout = chosen

    def seen(update: Batch) -> None:
        if chosen is not None:
            found.tokens += _columns(session, update, chosen)

    try:
        metrics = make_step(session, rollouts, {}, seen=seen, writes=False)
    except GuardError as error:
        found.refusal = str(error)
        if step in then:
            found.difference = found.difference or f"step {step}: a guard refuses it now, and did not then: {error}"
        return
    found.then = dict(then.get(step, {}))
    found.now = {name: metric.value for name, metric in metrics.items() if metric.count}
    found.weights = digests(session)
    found.difference = found.difference or _metrics_differ(step, found) or _weights_differ(session, weights)


def _chosen(rollouts: Sequence[Rollout], line: int, path: Path) -> Rollout:
    if not 1 <= line <= len(rollouts):
        raise UserError(f"--rollout must be a line of {path}, from 1 to {len(rollouts)}, got {line}.")
    return rollouts[line - 1]


def _metrics_differ(step: int, found: Replayed) -> str:
    if not found.then:
        return f"step {step}: metrics.jsonl has no line of it"
    first = ["loss", "grad_norm"]
    for name in [*first, *sorted(set(found.now) - set(first))]:
        if name in found.now and not _same(found.then.get(name), found.now[name]):
            return f"step {step}: {name} was {found.then.get(name)} and is {found.now[name]}"
    return ""


def _same(then: float | None, now: float) -> bool:
    return then is not None and (then == now or not (math.isfinite(then) or math.isfinite(now)))


def _weights_differ(session: Session, weights: Mapping[int, Mapping[str, str]]) -> str:
    then, now = weights.get(session.step), digests(session)
    where = f"after step {session.step}" if session.step else "before the first step"
    if then is None:
        return f"{where}: no checksum of the weights was recorded"
    differing = next((name for name in now if then.get(name) != now[name]), None)
    if differing is None:
        return ""
    return f"{where}: the weights of the {differing} had checksum {then.get(differing)} and have {now[differing]}"


def _columns(session: Session, update: Batch, chosen: Rollout) -> Iterator[TokenRow]:
    """The tokens of a rollout, if it is part of an update."""
    groups = update.group_ids[update.starts].tolist()
    names = zip(update.names, groups, strict=True)
    places = [place for place, (name, group) in enumerate(names) if (name, group) == (chosen.name, chosen.group_id)]
    if not places:
        return
    one = update.select(places[:1])
    logprobs, losses = session.trainer.token_losses(one, session.objective)
    old = logprobs if one.old_logprobs is None else one.old_logprobs
    for at, token in enumerate(one.tokens.tolist()):
        yield TokenRow(
            token=token,
            text=session.loaded.tokenizer.decode([token]),
            is_trained=bool(one.loss_mask[at]),
            rollout_logprob=float(one.rollout_logprobs[at]),
            old_logprob=float(old[at]),
            logprob=float(logprobs[at]),
            advantage=float(one.advantages[at]),
            weight=float(one.token_weights[at]),
            loss=float(losses[at]),
        )
