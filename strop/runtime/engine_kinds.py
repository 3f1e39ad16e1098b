"""What the kinds of engines beside `torch` need, by the name that `engine.kind` has for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.config import EngineOptions, VLLMInProcessOptions

if TYPE_CHECKING:
    from strop.engines.served.engine import ServedEngine


def check_engine(options: EngineOptions) -> None:
    """Raises UserError where an engine needs what is not installed here."""
    if isinstance(options, VLLMInProcessOptions):
        from strop.engines.vllm.in_process import VLLMInProcess

        VLLMInProcess.core.check()


def served_engine(kind: str) -> type[ServedEngine]:
    """The engine of a kind whose samples come from servers."""
    if kind == "vllm":
        from strop.engines.vllm.engine import VLLMEngine

        return VLLMEngine
    from strop.engines.sglang.engine import SGLangEngine

    return SGLangEngine
