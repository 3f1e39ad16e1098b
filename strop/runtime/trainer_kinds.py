"""The kinds of trainers, by the name that `trainer.kind` has for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from strop.config import MegatronTrainerOptions, ModelOptions, ProcessesOptions
from strop.runtime.models import choose_device
from strop.trainers import TorchTrainer

if TYPE_CHECKING:
    from strop.trainers.megatron import MegatronTrainer

PolicyTrainer: TypeAlias = "TorchTrainer | MegatronTrainer"


def trainer_class(options: ProcessesOptions) -> Any:
    """The trainer of a kind."""
    if isinstance(options, MegatronTrainerOptions):
        from strop.trainers.megatron import MegatronTrainer

        return MegatronTrainer
    return TorchTrainer


def check_trainer(options: ProcessesOptions, model: ModelOptions) -> None:
    """Raises UserError where this machine has not what a kind needs; cheap, before a model is loaded."""
    if isinstance(options, MegatronTrainerOptions):
        from strop.trainers.megatron import check_megatron

        check_megatron(choose_device(model.device))
