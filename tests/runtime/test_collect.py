"""Collecting: which random streams a step's samples draw from."""

import asyncio
import types

from strop.config import TrainConfig, make_config
from strop.observe.console import QuietConsole
from strop.rewards.scorer import Unscored
from strop.rollout import mix_seed
from strop.runtime.collect import gather_groups
from strop.types import Completion, Prompt


class Engine:
    """Notes the seeds that it is asked for, request by request."""

    def __init__(self):
        self.seeds = []

    async def generate(self, request):
        self.seeds.append(request.seeds)
        return [Completion((9,), (-0.5,), (0,), "stop") for _ in request.seeds]


def test_seeds_follow_from_the_seed_the_step_and_the_place_in_it():
    """As in every run so far: three prompts a step, two samples each, steps 0 and 1 of seed 7."""
    root = {"model": {"path": "m"}, "data": {"kind": "jsonl", "path": "d"}, "reward": {"kind": "exact"}}
    config = make_config(
        TrainConfig, root | {"seed": 7, "rollout": {"prompts_per_step": 3, "group_size": 2}}, {}, file="x.toml"
    )
    prompts = [Prompt(row=row, tokens=(5,), text="") for row in range(3)]
    session = types.SimpleNamespace(
        config=config,
        prompts=prompts,
        engine=Engine(),
        cursor=types.SimpleNamespace(take=lambda n: list(range(n)), metrics=dict),
        filters=lambda groups: types.SimpleNamespace(groups=groups, dropped={}),
        scorer=Unscored(),
        console=QuietConsole(),
        decode=lambda tokens: "",
        waiting=(),
        owed=(),
        num_prompts_sampled=0,
        step=0,
    )
    for session.step in (0, 1):
        groups, _ = asyncio.run(gather_groups(session))
        assert [group.group_id for group in groups] == [3 * session.step + place for place in range(3)]
    expected = [tuple(mix_seed(7, step, place, i) for i in range(2)) for step in (0, 1) for place in range(3)]
    assert session.engine.seeds == expected
