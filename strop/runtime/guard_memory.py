"""What guards remember of a run: the losses and KLs of its last steps, and how often it was skipped or taken back."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from strop.config import TrainConfig
from strop.types import GuardError, GuardName, StepMetrics

_LEAST_STEPS = 2  # of a window, before a median says anything


class GuardMemory:
    """Watches the updates of a run for jumps, and counts what guards did.

    A jump is measured against the median over all updates of the last `guards.window_steps` steps that were made. Values of
    exactly 0 (the KL to the old policy in the first update of a batch) say nothing and are left out.
    """

    def __init__(self, config: TrainConfig) -> None:
        options, kl = config.guards, config.algorithm.kl
        kl_name = f"kl_ref_{kl.kind}" if kl.coef > 0 and kl.place == "loss" else "kl_old_policy_k3"
        self.options = options
        self.num_skipped = 0
        self.num_rollbacks = 0
        self.num_skipped_in_a_row = 0
        self.wants_checkpoint = False  # the run was taken back: what follows must not be replayed across that
        self._watched: dict[GuardName, tuple[str, float | None]] = {
            "loss_jump": ("loss", options.max_loss_jump),
            "kl_jump": (kl_name, options.max_kl_jump),
        }
        self._steps: deque[dict[str, list[float]]] = deque(maxlen=options.window_steps)
        self._updates: list[dict[str, float]] = []  # of the step at hand

    def watch(self, metrics: StepMetrics) -> None:
        """Look at an update before the optimizer moves.

        Raises:
            GuardError: it is a jump.
        """
        found = {
            guard: abs(metrics[name].value)
            for guard, (name, limit) in self._watched.items()
            if limit and name in metrics
        }
        for guard, value in found.items():
            self._check(guard, value)
        self._updates.append(found)

    def _check(self, guard: GuardName, value: float) -> None:
        name, limit = self._watched[guard]
        past = [v for step in self._steps for v in step.get(guard, ()) if v > 0]
        if not past or limit is None or len(self._steps) < min(_LEAST_STEPS, self.options.window_steps):
            return
        usual = median(past)
        if not value <= limit * usual:
            raise GuardError(
                f"guards.max_{guard} must hold: |{name}| is {value:.3g}, {value / usual:.3g} times its median of {usual:.3g} "
                f"over the last {len(self._steps)} steps (bound {limit:g}). The step was not made.",
                guard=guard,
            )

    def step_made(self) -> None:
        """What was watched since the last step belongs to the memory now."""
        self.num_skipped_in_a_row = 0
        if any(self._updates):
            names = {name for update in self._updates for name in update}
            self._steps.append({n: [update[n] for update in self._updates if n in update] for n in sorted(names)})
        self._updates = []

    def step_refused(self) -> None:
        """What was watched since the last step is forgotten."""
        self._updates = []

    def counts(self) -> dict[str, float]:
        """Steps skipped and times taken back so far, where there are any, as they stand in metrics.jsonl."""
        found = {"guard/skipped": self.num_skipped, "guard/rollbacks": self.num_rollbacks}
        return {name: float(count) for name, count in found.items() if count}

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        return {
            "steps": list(self._steps),
            "num_skipped": self.num_skipped,
            "num_rollbacks": self.num_rollbacks,
            "num_skipped_in_a_row": self.num_skipped_in_a_row,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back all that `state` gave."""
        self.load_steps(state)
        self.num_skipped, self.num_rollbacks = state["num_skipped"], state["num_rollbacks"]
        self.num_skipped_in_a_row = state["num_skipped_in_a_row"]

    def load_steps(self, state: Mapping[str, Any]) -> None:
        """Take back the steps alone: the counts of what guards did go on."""
        self._steps = deque(state["steps"], maxlen=self.options.window_steps)
        self._updates = []
