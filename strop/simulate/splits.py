"""How to split the GPUs between sampling and training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from strop.config.simulation import SimulationConfig
from strop.simulate.loop import Outcome, simulate

_NUM_TRIED = 8  # splits in the first round
_FINENESS = 32


def as_synchronous(config: SimulationConfig) -> SimulationConfig:
    """The plan without sampling ahead."""
    return config.model_copy(update={"max_off_policy_steps": 0})


def as_asynchronous(config: SimulationConfig) -> SimulationConfig:
    """The plan with GPUs of their own for both parts."""
    return config.model_copy(update={"shared_gpus": False})


def taking_turns(config: SimulationConfig) -> SimulationConfig | None:
    """The synchronous loop in which all GPUs sample and then all train; None where there are too few for an engine."""
    num_gpus = config.gpus_to_split
    changes = {"num_engines": num_gpus // config.gpus_per_engine, "num_trainers": num_gpus, "shared_gpus": True}
    return as_synchronous(config.model_copy(update=changes)) if changes["num_engines"] else None


def split(config: SimulationConfig, num_gpus: int, num_engines: int) -> SimulationConfig:
    """The plan with that many engines; all other GPUs train."""
    num_trainers = num_gpus - num_engines * config.gpus_per_engine
    changes = {"num_engines": num_engines, "num_trainers": num_trainers, "shared_gpus": False}
    return config.model_copy(update=changes)


def try_splits(config: SimulationConfig, *, tell: Callable[[int], None] = lambda _: None) -> list[Outcome]:
    """The asynchronous loop on the plan's number of GPUs, by number of engines: evenly spaced splits, then those in the middle
    between the best one and its neighbours, until these are no further away than a 32nd of the most engines.

    Args:
        config: the plan.
        tell: told of the number of splits that were tried, after each.
    """
    num_gpus, found = config.gpus_to_split, dict[int, Outcome]()
    most = (num_gpus - 1) // config.gpus_per_engine  # one GPU at least trains
    tried = (
        {round(1 + (most - 1) * place / (_NUM_TRIED - 1)) for place in range(_NUM_TRIED)} if most > 0 else set[int]()
    )
    while tried:
        for num_engines in sorted(tried):
            found[num_engines] = simulate(split(config, num_gpus, num_engines))
            tell(len(found))
        tried = set(_beside_the_best(list(found.values()), least=most // _FINENESS)) - set(found)
    return [found[num_engines] for num_engines in sorted(found)]


def _beside_the_best(outcomes: Sequence[Outcome], *, least: int) -> Iterator[int]:
    """Numbers of engines in the middle between the best one and its neighbours, of those that are further away."""
    middle = fastest(outcomes).config.num_engines
    numbers = sorted(outcome.config.num_engines for outcome in outcomes)
    place = numbers.index(middle)
    for beside in (*numbers[max(place - 1, 0) : place], *numbers[place + 1 : place + 2]):
        if abs(beside - middle) > least:
            yield (beside + middle) // 2


def fastest(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome with the most steps per hour; the first of equal ones."""
    return max(outcomes, key=lambda outcome: outcome.steps_per_hour)
