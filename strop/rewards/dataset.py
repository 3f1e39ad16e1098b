"""The score of reasoning-gym's own scorer."""

from __future__ import annotations

import json
from typing import Any

from strop.types import RewardError, Rollout


class DatasetScore:
    """Scores a response with the dataset that made its prompt.

    `load_prompts` leaves in the prompt's metadata what is needed: the dataset's name, its settings (some scorers use
    them), and the entry. The scorer is given the response without white space around it.
    """

    def __init__(self) -> None:
        self._datasets: dict[str, Any] = {}

    def __call__(self, rollout: Rollout) -> float:
        metadata = rollout.prompt.metadata
        if not {"dataset", "options", "entry"} <= metadata.keys():
            raise RewardError(
                f"reward.kind must not be dataset for prompts that reasoning-gym did not make, such as row "
                f"{rollout.prompt.row}. Set data.kind = reasoning_gym, or use another kind of reward."
            )
        dataset = self._dataset(metadata["dataset"], metadata["options"])
        return dataset.score_answer(rollout.text.strip(), metadata["entry"])

    def _dataset(self, name: str, options: dict[str, Any]) -> Any:
        key = json.dumps([name, options], sort_keys=True, default=repr)
        if key not in self._datasets:
            from reasoning_gym.factory import create_dataset

            self._datasets[key] = create_dataset(name, **{"seed": 0, "size": 1, **options})
        return self._datasets[key]
