"""How a model of vLLM takes weights in place. It is imported by the server's workers, as strop_vllm.py is, and by strop where
vLLM runs in its own process; it imports nothing of strop."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch


def reload(model: Any, model_config: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load weights, under the names of the model's files, into the tensors that the model has."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(model)
    try:
        model.load_weights(weights)
    finally:
        finalize_layerwise_reload(model, model_config)
        _pack_again(model)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _pack_again(model: Any) -> None:
    """On the CPU a head holds a packed copy of its weight. One that is tied to the embedding is given no weight of its own, and
    vLLM's reload leaves its copy as it was."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)


def files_of(model_config: Any) -> tuple[Path, bool]:
    """The folder that a model came from, and whether its head is its embedding."""
    tied = bool(getattr(model_config.hf_config, "tie_word_embeddings", False))
    return _folder_of(model_config.model), tied


def _folder_of(model: str) -> Path:
    """The folder of a model, or of the copy of one that was had by its name."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, local_files_only=True, allow_patterns=["*.safetensors", "*.json"]))
