"""A trainer made of Megatron-Core's layers, optimizers and pipeline. Nothing of Megatron's is imported before it is chosen."""

from strop.trainers.megatron.environment import check_megatron, matrix_modules
from strop.trainers.megatron.trainer import MegatronTrainer

__all__ = ["MegatronTrainer", "check_megatron", "matrix_modules"]
