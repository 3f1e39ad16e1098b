"""What a cluster would do with a run: a discrete-event simulation of the loop. No torch."""

from strop.simulate.from_run import measure
from strop.simulate.loop import Outcome, SimulatedStep, simulate
from strop.simulate.plan import Findings, examine
from strop.simulate.splits import fastest, try_splits

__all__ = ["Findings", "Outcome", "SimulatedStep", "examine", "fastest", "measure", "simulate", "try_splits"]
