"""Models that learn."""

from strop.trainers.layout import Layout, cut, lay_out, padding_share
from strop.trainers.schedule import lr_factor
from strop.trainers.torch_trainer import TorchTrainer

__all__ = ["Layout", "TorchTrainer", "cut", "lay_out", "lr_factor", "padding_share"]
