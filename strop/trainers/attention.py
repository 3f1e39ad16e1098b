"""What a model's config says of its attention."""

from __future__ import annotations

from typing import Any


def attends_to_all(model: Any) -> bool:
    """True if every layer attends to everything before it: no window, no chunks, no state in place of attention."""
    settings = model.config.get_text_config().to_dict()
    kinds = settings.get("layer_types")
    if kinds is not None:
        return set(kinds) == {"full_attention"}
    windows = [value for name, value in settings.items() if name.endswith(("window", "window_size"))]
    return not any(windows)
