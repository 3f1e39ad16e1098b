"""Three processes that share a step have, together, the loss, the metrics and the gradient of one process: for every policy
loss, and for every reduction and correction of one of them.
"""

import conformance_cases as suite
import pytest
import rank_processes
from conformance_cases import CASES, LOSSES, REDUCTIONS
from torch.optim.optimizer import register_optimizer_step_pre_hook

from strop.trainers import TorchTrainer

NUM_RANKS = 3
CHOSEN = [
    name
    for name, algorithm in CASES.items()
    if algorithm["policy_loss"] == LOSSES["ppo_clip"] or name.endswith((f"-{REDUCTIONS[0]}", "-everything"))
]


class Together:
    """A trainer over the ranks; of the gradients it sees the rows that rank 0 holds, and the norm of all."""

    def __init__(self, ranks):
        options = suite.trainer_of(budget=suite.UNEVEN).options
        self._trainer = ranks.make(TorchTrainer, suite.llama(), options, total_steps=10**9)

    def step(self, batch, objective):
        gradients, learning = {}, self._trainer._learning

        def remember(*_):
            gradients.update({name: p.grad.to_local().clone() for name, p in learning.named_parameters()})

        hook = register_optimizer_step_pre_hook(remember)
        try:
            metrics = self._trainer.step(suite.prepared(batch, objective), objective)
        finally:
            hook.remove()
        return {name: metric.value for name, metric in metrics.items() if name != "padding_share"}, gradients


@pytest.fixture(scope="module")
def together():
    with rank_processes.opened(NUM_RANKS) as ranks:
        yield Together(ranks)


def whole(name):
    """What one process has, and the first rows of its gradients."""
    metrics, gradients = suite.whole(name)
    return metrics, {key: gradient.chunk(NUM_RANKS)[0] for key, gradient in gradients.items()}


@pytest.mark.parametrize("name", CHOSEN)
def test_ranks_together_have_the_gradient_of_one_process(name, together):
    suite.check_same(together.step(suite.made_batch(), suite.objective_of(name)), whole(name))


def test_a_sequence_that_is_lost_between_ranks_is_seen(together):
    name = next(iter(CASES))
    lacking = suite.made_batch().select(range(9))
    with pytest.raises(AssertionError):
        suite.check_same(together.step(lacking, suite.objective_of(name)), whole(name))
