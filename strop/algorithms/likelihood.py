"""The objective of supervised fine-tuning: the mean negative log-probability of the demonstrations' tokens."""

from __future__ import annotations

from torch import Tensor

from strop.algorithms.objective import TrainableTokens
from strop.types import Metric, StepMetrics


class LikelihoodObjective:
    """loss_t = -logprobs_t, averaged over the tokens of the step."""

    uses_reference = False
    uses_entropy = False
    measures_entropy = False
    temperature = 1.0

    def loss(self, tokens: TrainableTokens) -> tuple[Tensor, StepMetrics]:
        nll = -tokens.logprobs
        return nll, {"nll": Metric.mean(float(nll.detach().sum()), nll.numel())}
