"""The proposal: the split that leaves the least time waiting."""

import pytest
from simulate.plans import plan

from strop.observe.console import QuietConsole
from strop.simulate import examine, fastest, try_splits
from strop.simulate.plan import proposal

# Sampling takes 64 x 10 x .25 = 160 engine seconds, whatever the number of engines; training takes 480 GPU seconds.
DIVISIBLE = {
    "max_off_policy_steps": 1,
    "prompts_per_step": 64,
    "group_size": 1,
    "max_sequences": 64,
    "decode_step_s": 0,
    "prompt_tokens": 0,
    "score_s": 0,
    "transfer_s": 0,
    "train_step_s": 0,
    "train_token_s": 0.75,
}


@pytest.mark.parametrize("num_gpus, engines", [(8, 2), (16, 4), (64, 16)])
def test_the_best_split_divides_the_gpus_as_the_work_is_divided(num_gpus, engines):
    found = try_splits(plan(**DIVISIBLE, num_steps=20, split_gpus=num_gpus))
    assert fastest(found).config.num_engines == engines
    assert all(o.config.num_engines + o.config.num_trainers == num_gpus for o in found)


def test_an_engine_of_several_gpus_is_not_cut():
    found = try_splits(plan(**DIVISIBLE, gpus_per_engine=3, split_gpus=8))
    assert [(o.config.num_engines, o.config.num_trainers) for o in found] == [(1, 5), (2, 2)]


def test_all_gpus_by_turns_are_proposed_where_that_is_faster():
    """Without fixed parts nobody ever waits in turns, and ahead of training only the first batch costs anything: with one step
    that is all there is."""
    found = examine(plan(**DIVISIBLE, num_steps=1, split_gpus=8), QuietConsole())
    assert found.best is found.in_turns
    assert proposal(found).startswith("Proposal: the synchronous loop on all 8 GPUs by turns, with 8 engines: ")


@pytest.mark.parametrize("options", [{"max_off_policy_steps": 0}, {"split_gpus": 2, "gpus_per_engine": 2}])
def test_there_is_no_proposal_without_something_to_split(options):
    found = examine(plan(**DIVISIBLE | options), QuietConsole())
    assert found.best is None
    assert proposal(found).startswith("Proposal: none.")


def test_progress_is_told_step_by_step_and_split_by_split():
    told = []

    class Listening(QuietConsole):
        def advance(self, done):
            told.append(done)

    console = Listening()
    found = examine(plan(**DIVISIBLE, split_gpus=4, num_steps=2), console)
    assert told == [1, 2, 1, 2, 1, 2, *range(1, len(found.splits) + 1)]
