"""Samplers behind one protocol."""

from strop.engines.torch_engine import TorchEngine

__all__ = ["TorchEngine"]
