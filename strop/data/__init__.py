"""Prompt sources, chat templates, and batches: rollouts to tensors."""

from strop.data.batch import Batch, build_batch, demonstration_batch
from strop.data.conversations import special_ids
from strop.data.cursor import Cursor, PromptCursor
from strop.data.demonstrations import Demonstration, load_demonstrations
from strop.data.mixture import make_cursor
from strop.data.sources import LoadedPrompts, load_prompts

__all__ = [
    "Batch",
    "Cursor",
    "Demonstration",
    "LoadedPrompts",
    "PromptCursor",
    "build_batch",
    "demonstration_batch",
    "load_demonstrations",
    "load_prompts",
    "make_cursor",
    "special_ids",
]
