"""Models that learn."""

from strop.trainers.layout import Layout, cut, lay_out, padding_share
from strop.trainers.schedule import lr_factor
from strop.trainers.torch_critic import CRITIC_FILE, TorchCritic
from strop.trainers.torch_trainer import REFERENCE_FILE, TorchTrainer
from strop.trainers.values import ValueModel, body_of

__all__ = [
    "CRITIC_FILE",
    "REFERENCE_FILE",
    "Layout",
    "TorchCritic",
    "TorchTrainer",
    "ValueModel",
    "body_of",
    "cut",
    "lay_out",
    "lr_factor",
    "padding_share",
]
