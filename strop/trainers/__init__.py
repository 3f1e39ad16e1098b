"""Models that learn."""

from strop.trainers.adapters import WholeWeights, attach_adapters, check_peft, has_adapters, merged, save_adapters
from strop.trainers.cutting import Costs, Cut, cheapest, cut, cut_batch
from strop.trainers.layout import Layout, lay_out
from strop.trainers.ranks import Ranks
from strop.trainers.schedule import lr_factor
from strop.trainers.torch_critic import CRITIC_FILE, TorchCritic
from strop.trainers.torch_trainer import REFERENCE_FILE, TorchTrainer
from strop.trainers.values import ValueModel, body_of

__all__ = [
    "CRITIC_FILE",
    "REFERENCE_FILE",
    "Costs",
    "Cut",
    "Layout",
    "Ranks",
    "TorchCritic",
    "TorchTrainer",
    "ValueModel",
    "WholeWeights",
    "attach_adapters",
    "body_of",
    "cheapest",
    "check_peft",
    "cut",
    "cut_batch",
    "has_adapters",
    "lay_out",
    "lr_factor",
    "merged",
    "save_adapters",
]
