"""Options: one typed tree per command, loaded from TOML and overrides, checked before any model is touched. No torch."""

from strop.config.advantage import GroupAdvantageOptions
from strop.config.algorithm import AlgorithmOptions, KLOptions
from strop.config.base import Options
from strop.config.data import DataOptions, DemonstrationOptions, JSONLOptions, ParquetOptions, ReasoningGymOptions
from strop.config.distillation import DistillationOptions, is_address
from strop.config.load import load_config, make_config
from strop.config.policy_loss import CISPOOptions, PPOClipOptions
from strop.config.presets import PRESETS
from strop.config.render import to_toml
from strop.config.root import SFTConfig, TrainConfig
from strop.config.sampling import EvalOptions, RewardOptions, RolloutOptions
from strop.config.training import GuardOptions, ModelOptions, RunOptions, TorchEngineOptions, TorchTrainerOptions

__all__ = [
    "PRESETS",
    "AlgorithmOptions",
    "CISPOOptions",
    "DataOptions",
    "DemonstrationOptions",
    "DistillationOptions",
    "EvalOptions",
    "GroupAdvantageOptions",
    "GuardOptions",
    "JSONLOptions",
    "KLOptions",
    "ModelOptions",
    "Options",
    "PPOClipOptions",
    "ParquetOptions",
    "ReasoningGymOptions",
    "RewardOptions",
    "RolloutOptions",
    "RunOptions",
    "SFTConfig",
    "TorchEngineOptions",
    "TorchTrainerOptions",
    "TrainConfig",
    "is_address",
    "load_config",
    "make_config",
    "to_toml",
]
