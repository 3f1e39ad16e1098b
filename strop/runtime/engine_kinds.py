"""The kinds of engines whose samples come from servers, by the name that `engine.kind` has for them."""

from __future__ import annotations

from strop.engines.served.engine import ServedEngine


def served_engine(kind: str) -> type[ServedEngine]:
    """The engine of a kind."""
    if kind == "vllm":
        from strop.engines.vllm.engine import VLLMEngine

        return VLLMEngine
    from strop.engines.sglang.engine import SGLangEngine

    return SGLangEngine
