"""A plan as a person reads it: both loops beside each other, the splits that were tried, the proposal, a page of plots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console as RichConsole
from rich.table import Table

from strop.config.simulation import SimulationConfig
from strop.observe.console import Console
from strop.observe.report import curves, write_page
from strop.simulate.loop import Outcome, simulate
from strop.simulate.splits import as_asynchronous, as_synchronous, fastest, taking_turns, try_splits
from strop.types import UserError

HOW = "The asynchronous loop is that of strop train with rollout.max_off_policy_steps and rollout.streaming."


class Findings(NamedTuple):
    """What was simulated for a plan."""

    synchronous: Outcome
    asynchronous: Outcome | None  # None without a step ahead
    in_turns: Outcome | None  # synchronous, all GPUs sampling and then training
    splits: Sequence[Outcome]  # asynchronous, by number of engines

    @property
    def best(self) -> Outcome | None:
        """The proposal; None where there is nothing to split."""
        tried = [*self.splits, *([self.in_turns] if self.in_turns is not None else ())]
        return fastest(tried) if self.splits else None


def examine(config: SimulationConfig, console: Console) -> Findings:
    """Simulate both loops and all splits of a plan, and report progress."""

    def run(name: str, plan: SimulationConfig) -> Outcome:
        with console.phase(name, plan.num_steps):
            return simulate(plan, tell=console.advance)

    synchronous = run("synchronous", as_synchronous(config))
    if not config.batches_ahead:
        return Findings(synchronous, None, None, ())
    asynchronous, turns = run("asynchronous", as_asynchronous(config)), taking_turns(config)
    in_turns = None if turns is None else run("in turns", turns)
    with console.phase("splits", 0):
        return Findings(synchronous, asynchronous, in_turns, try_splits(config, tell=console.advance))


def print_measured(options: Mapping[str, Any]) -> None:
    """What runs gave, as lines of a plan."""
    for name, value in options.items():
        if name == "response_tokens":
            print(
                f"# {len(value)} responses of {min(value)} to {max(value)} tokens, {sum(value) / len(value):.1f} in the mean"
            )
        elif name.endswith("_s"):
            print(f"{name} = {value:.4g}")
    if options and not options["decode_sequence_s"]:
        print(
            "# decode_sequence_s could not be told from decode_step_s: it may with one more --from-run, of larger or smaller"
        )
        print("# batches or with another engine.max_sequences.")


def print_findings(found: Findings) -> None:
    """Tables on standard output."""
    console = RichConsole(highlight=False, soft_wrap=True)
    loops = [outcome for outcome in (found.synchronous, found.asynchronous) if outcome is not None]
    table = Table("", *("synchronous", "asynchronous")[: len(loops)], title="the plan", title_justify="left")
    columns = [dict(_figures(outcome)) for outcome in loops]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    console.print(table)
    if found.splits:
        console.print(_splits(found))
    console.print(proposal(found))
    if found.asynchronous is not None:
        console.print(HOW)


def _figures(outcome: Outcome) -> Iterator[tuple[str, str]]:
    config, steps = outcome.config, outcome.steps
    shared = ", shared" if config.shared_gpus else ""
    yield (
        "engines x GPUs + training GPUs",
        f"{config.num_engines} x {config.gpus_per_engine} + {config.num_trainers}{shared}",
    )
    yield "seconds per step", f"{outcome.seconds / config.num_steps:.4g}"
    yield "steps per hour", _rate(outcome.steps_per_hour)
    yield "response tokens per second", f"{outcome.tokens_per_second:,.0f}"
    yield "engines idle", f"{1 - outcome.engines_busy:.1%}"
    yield "places of engines empty", f"{1 - outcome.occupancy:.1%}"
    yield "trainers idle", f"{1 - outcome.trainers_busy:.1%}"
    yield "training waits for samples", f"{sum(step.waited_s for step in steps) / outcome.seconds:.1%}"
    yield "staleness, mean and most", f"{outcome.staleness:.2f}, {outcome.staleness_max}"
    yield "failures of engines and trainers", f"{outcome.num_engine_failures}, {outcome.num_trainer_failures}"
    yield "steps made again", str(len(steps) - config.num_steps)
    yield "cost of a step", f"{outcome.cost_per_step:.4g}"
    yield f"cost of {config.num_steps} steps", f"{outcome.cost_per_step * config.num_steps:.4g}"


def _splits(found: Findings) -> Table:
    names = (
        "engines",
        "GPUs sampling",
        "GPUs training",
        "steps per hour",
        "engines idle",
        "trainers idle",
        "cost of a step",
    )
    table = Table(*names, title="splits of the GPUs, asynchronous", title_justify="left")
    for outcome in found.splits:
        config = outcome.config
        table.add_row(
            str(config.num_engines),
            str(config.num_engines * config.gpus_per_engine),
            str(config.num_trainers),
            _rate(outcome.steps_per_hour),
            f"{1 - outcome.engines_busy:.1%}",
            f"{1 - outcome.trainers_busy:.1%}",
            f"{outcome.cost_per_step:.4g}",
            style="bold" if outcome is found.best else "",
        )
    return table


def _rate(number: float) -> str:
    return f"{number:.4g}" if number < 1e4 else f"{number:,.0f}"


def proposal(found: Findings) -> str:
    """The split with the most steps per hour, in a sentence."""
    best = found.best
    if best is None:
        return "Proposal: none. It takes a step ahead (max_off_policy_steps) and GPUs for an engine and a trainer (split_gpus)."
    config = best.config
    if config.shared_gpus:
        how = f"the synchronous loop on all {config.num_gpus} GPUs by turns, with {config.num_engines} engines"
    else:
        sampling = f"{config.num_engines} x {config.gpus_per_engine}"
        how = f"{sampling} GPUs for sampling, {config.num_trainers} for training, asynchronous"
    words = f"Proposal: {how}: {_rate(best.steps_per_hour)} steps per hour"
    if found.in_turns is not None and best is not found.in_turns:
        times = best.steps_per_hour / found.in_turns.steps_per_hour
        words += f", {times:.2f} times what all {config.num_gpus} GPUs do by turns in the synchronous loop"
    return f"{words}, at {best.cost_per_step:.4g} a step."


def write_plots(path: Path, title: str, found: Findings) -> None:
    """One HTML file that needs no network: both loops over their steps, and the splits.

    Raises:
        UserError: the file cannot be written.
    """
    sections = [
        curves(name, _by_step(outcome), ("seconds", "waited_s", "trained_s", "response_tokens", "staleness"))
        for name, outcome in (("Synchronous", found.synchronous), ("Asynchronous", found.asynchronous))
        if outcome is not None
    ]
    if found.splits:
        rows = [
            {
                "engine": outcome.config.num_engines,
                "steps per hour": outcome.steps_per_hour,
                "engines idle": 1 - outcome.engines_busy,
                "trainers idle": 1 - outcome.trainers_busy,
                "cost of a step": outcome.cost_per_step,
            }
            for outcome in found.splits
        ]
        sections.append(curves("Splits of the GPUs", rows, list(rows[0])[1:], across="engine"))
    text = f"{proposal(found)}\n{HOW if found.asynchronous is not None else ''}"
    try:
        write_page(path, title, text, *sections)
    except OSError as error:
        raise UserError(f"--output must be a file that can be written, got {str(path)!r}: {error}.") from error


def _by_step(outcome: Outcome) -> list[dict[str, float]]:
    begun = [0.0, *(step.ended_s for step in outcome.steps)]
    return [
        {
            "step": number,
            "seconds": step.ended_s - began,
            "waited_s": step.waited_s,
            "trained_s": step.trained_s,
            "response_tokens": step.response_tokens,
            "staleness": step.staleness,
        }
        for number, (began, step) in enumerate(zip(begun, outcome.steps, strict=False), 1)
    ]
