"""The objective of supervised fine-tuning: the negative log-probability of the demonstrations' tokens."""

from __future__ import annotations

from torch import Tensor

from strop.algorithms.objective import TrainableTokens
from strop.config import SFTConfig
from strop.types import Metric, StepMetrics

_MEANS = {
    "token_mean": "mean over the step's learned tokens of {}",
    "sequence_mean": "mean over the step's demonstrations of (mean over its learned tokens of {})",
    "constant_length": "mean over the step's demonstrations of (sum over its learned tokens of {}) / {max_tokens}",
}


class LikelihoodObjective:
    """loss_t = -logprobs_t, averaged as the token weights say."""

    uses_reference = False
    uses_entropy = False
    measures_entropy = False
    temperature = 1.0

    def loss(self, tokens: TrainableTokens) -> tuple[Tensor, StepMetrics]:
        nll = -tokens.logprobs
        return nll, {"nll": Metric.mean(float(nll.detach().sum()), nll.numel())}


def likelihood_formula(config: SFTConfig) -> str:
    """What `strop sft` minimises, with the numbers of the config."""
    mean = _MEANS[config.loss.reduction].format("logprobs_t", max_tokens=config.data.max_length_tokens)
    return f"minimise  -({mean})\n"
