"""What strop brings into a vLLM server: a way to take weights from files. It is imported by the server's workers
(--worker-extension-cls strop_vllm.Extension), in vLLM's own environment, with this file's folder on PYTHONPATH. As a program it
is the server itself: python strop_vllm.py ARGUMENTS OF vllm serve.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

BACKEND = "strop_files"


class Extension:
    """Nothing beside the registration below: a worker has to import this file to know the way."""


def register() -> None:
    """Name the way to vLLM."""
    from dataclasses import dataclass

    import strop_weights
    import torch
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class Init(WeightTransferInitInfo):
        keeps_copy: bool = False

    @dataclass
    class Update(WeightTransferUpdateInfo):
        folder: str
        kind: str
        version: str
        checksum: str
        num_bytes: int
        base: str = ""

    class FilesEngine(WeightTransferEngine[Init, Update]):
        """Weights from safetensors files that both sides can read. Everything is checked before the model is touched."""

        init_info_cls, update_info_cls = Init, Update
        supports_draft_weight_update = False

        def init_transfer_engine(self, init_info: Init) -> None:
            tied = bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))
            own = strop_weights.shapes_in(_folder_of(self.model_config.model))
            self._keeps_copy, self._inbox = init_info.keeps_copy, strop_weights.Inbox(own, tied=tied)

        def start_weight_update(self) -> None:
            pass

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Update) -> None:
            parcel = strop_weights.Parcel(**vars(update_info))
            self._inbox.check(parcel)
            initialize_layerwise_reload(self.model)
            try:
                self.model.load_weights(self._inbox.take(parcel, keep=self._keeps_copy))
            finally:
                finalize_layerwise_reload(self.model, self.model_config)
                _pack_again(self.model)
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()

        def finish_weight_update(self) -> None:
            pass

        def shutdown(self) -> None:
            pass

    WeightTransferEngineFactory.register_engine(BACKEND, FilesEngine)


def _pack_again(model: Any) -> None:
    """On the CPU a head holds a packed copy of its weight. One that is tied to the embedding is given no weight of its own, and
    vLLM's reload leaves its copy as it was."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)


def _folder_of(model: str) -> Path:
    """The folder of a model, or of the copy of one that was had by its name."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, local_files_only=True, allow_patterns=["*.safetensors", "*.json"]))


def main() -> None:
    """Run vLLM's server with this program's arguments."""
    import runpy

    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
else:
    register()
