"""strop: reinforcement learning post-training of language models.

    import strop
    config = strop.load_config("config.toml", {"run.num_steps": 20})
    result = strop.train(config)

`strop.ops` holds the mathematics and needs only torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strop.config import load_config
    from strop.runtime import evaluate, sft, train

__version__ = "0.1.0"
__all__ = ["evaluate", "load_config", "sft", "train"]

_HOME = {"load_config": "strop.config", "train": "strop.runtime", "sft": "strop.runtime", "evaluate": "strop.runtime"}


def __getattr__(name: str) -> Any:
    """Load a command's function when it is first used: `import strop` alone stays light."""
    if name not in _HOME:
        raise AttributeError(f"module 'strop' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
