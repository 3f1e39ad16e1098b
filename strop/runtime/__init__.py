"""The commands as functions: the loop, evaluation, fine-tuning, checkpoints."""

from strop.runtime.evaluate import evaluate
from strop.runtime.evaluation import Evaluation, Score
from strop.runtime.sft import SFTResult, sft
from strop.runtime.train import TrainResult, train

__all__ = ["Evaluation", "SFTResult", "Score", "TrainResult", "evaluate", "sft", "train"]
