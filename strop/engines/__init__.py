"""Samplers behind one protocol."""

from strop.engines.decoders import max_positions
from strop.engines.torch_engine import TorchEngine

__all__ = ["TorchEngine", "max_positions"]
