"""Options: one typed tree per command, loaded from TOML and overrides, checked before any model is touched. No torch."""

from strop.config.advantage import GroupAdvantageOptions
from strop.config.algorithm import AlgorithmOptions, KLOptions
from strop.config.base import Options
from strop.config.critic import CriticOptions
from strop.config.data import DataOptions, DemonstrationOptions, JSONLOptions, ParquetOptions, ReasoningGymOptions
from strop.config.evaluation import EvalOptions, EvalSetOptions
from strop.config.imitation import LossOptions, ValidationOptions
from strop.config.load import load_config, make_config
from strop.config.policy_loss import CISPOOptions, PPOClipOptions
from strop.config.presets import PRESETS
from strop.config.render import to_toml
from strop.config.root import RootConfig, SFTConfig, TrainConfig, warmup_fits
from strop.config.sampling import RewardOptions, RolloutOptions
from strop.config.training import (
    AdamWOptions,
    GuardOptions,
    ModelOptions,
    RunOptions,
    TorchEngineOptions,
    TorchTrainerOptions,
)

__all__ = [
    "PRESETS",
    "AdamWOptions",
    "AlgorithmOptions",
    "CISPOOptions",
    "CriticOptions",
    "DataOptions",
    "DemonstrationOptions",
    "EvalOptions",
    "EvalSetOptions",
    "GroupAdvantageOptions",
    "GuardOptions",
    "JSONLOptions",
    "KLOptions",
    "LossOptions",
    "ModelOptions",
    "Options",
    "PPOClipOptions",
    "ParquetOptions",
    "ReasoningGymOptions",
    "RewardOptions",
    "RolloutOptions",
    "RootConfig",
    "RunOptions",
    "SFTConfig",
    "TorchEngineOptions",
    "TorchTrainerOptions",
    "TrainConfig",
    "ValidationOptions",
    "load_config",
    "make_config",
    "to_toml",
    "warmup_fits",
]
