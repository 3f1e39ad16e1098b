"""What strop brings into a vLLM server: a way to take weights from files. It is imported by the server's workers
(--worker-extension-cls strop_vllm.Extension), in vLLM's own environment, with this file's folder on PYTHONPATH. As a program it
is the server itself: python strop_vllm.py ARGUMENTS OF vllm serve.
"""

from __future__ import annotations

from typing import Any

BACKEND = "strop_files"


class Extension:
    """Nothing beside the registration below: a worker has to import this file to know the way."""


def register() -> None:
    """Name the way to vLLM."""
    from dataclasses import dataclass

    import strop_reload
    import strop_weights
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

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
            folder, tied = strop_reload.files_of(self.model_config)
            inbox = strop_weights.Inbox(strop_weights.shapes_in(folder), tied=tied)
            self._keeps_copy, self._inbox = init_info.keeps_copy, inbox

        def start_weight_update(self) -> None:
            pass

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Update) -> None:
            parcel = strop_weights.Parcel(**vars(update_info))
            self._inbox.check(parcel)
            strop_reload.reload(self.model, self.model_config, self._inbox.take(parcel, keep=self._keeps_copy))

        def finish_weight_update(self) -> None:
            pass

        def shutdown(self) -> None:
            pass

    WeightTransferEngineFactory.register_engine(BACKEND, FilesEngine)


def main() -> None:
    """Run vLLM's server with this program's arguments."""
    import runpy

    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
else:
    register()
