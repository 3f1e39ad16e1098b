"""Options: one typed tree per command, loaded from TOML and overrides, checked before any model is touched. No torch."""

from strop.config.addresses import is_address
from strop.config.advantage import GroupAdvantageOptions
from strop.config.algorithm import AlgorithmOptions, KLOptions
from strop.config.base import Options
from strop.config.critic import CriticOptions
from strop.config.data import DataOptions, DemonstrationOptions, JSONLOptions, ParquetOptions, ReasoningGymOptions
from strop.config.distillation import DistillationOptions
from strop.config.engine import (
    EngineOptions,
    ServedEngineOptions,
    SGLangEngineOptions,
    TorchEngineOptions,
    VLLMEngineOptions,
    VLLMInProcessOptions,
)
from strop.config.evaluation import EvalOptions, EvalSetOptions
from strop.config.filtering import CurriculumOptions, FilterOptions, LengthPenaltyOptions
from strop.config.guards import GuardOptions
from strop.config.imitation import LossOptions, ValidationOptions
from strop.config.load import load_config, make_config
from strop.config.policy_loss import CISPOOptions, PPOClipOptions
from strop.config.presets import PRESETS, preset_values
from strop.config.render import to_toml
from strop.config.root import RootConfig, SFTConfig, TrainConfig
from strop.config.sampling import RewardOptions, RolloutOptions
from strop.config.train_rules import warmup_fits
from strop.config.training import (
    AdamWOptions,
    MegatronTrainerOptions,
    ModelOptions,
    ProcessesOptions,
    RunOptions,
    TorchTrainerOptions,
)

__all__ = [
    "PRESETS",
    "AdamWOptions",
    "AlgorithmOptions",
    "CISPOOptions",
    "CriticOptions",
    "CurriculumOptions",
    "DataOptions",
    "DemonstrationOptions",
    "DistillationOptions",
    "EngineOptions",
    "EvalOptions",
    "EvalSetOptions",
    "FilterOptions",
    "GroupAdvantageOptions",
    "GuardOptions",
    "JSONLOptions",
    "KLOptions",
    "LengthPenaltyOptions",
    "LossOptions",
    "MegatronTrainerOptions",
    "ModelOptions",
    "Options",
    "PPOClipOptions",
    "ParquetOptions",
    "ProcessesOptions",
    "ReasoningGymOptions",
    "RewardOptions",
    "RolloutOptions",
    "RootConfig",
    "RunOptions",
    "SFTConfig",
    "SGLangEngineOptions",
    "ServedEngineOptions",
    "TorchEngineOptions",
    "TorchTrainerOptions",
    "TrainConfig",
    "VLLMEngineOptions",
    "VLLMInProcessOptions",
    "ValidationOptions",
    "is_address",
    "load_config",
    "make_config",
    "preset_values",
    "to_toml",
    "warmup_fits",
]
