"""Options of where prompts and demonstrations come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from strop.config.base import Idle, Options, Problem


class _PromptOptions(Options):
    """What every source of prompts has."""

    chat: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Put prompts through the tokenizer's chat template; auto: if it has one, or the prompt is messages.",
    )
    system_prompt: str | None = Field(default=None, description="A system message before each prompt; none means none.")
    shuffle: bool = Field(default=True, description="A new order for every pass over the data, from the seed.")
    max_prompts: int | None = Field(default=None, ge=1, description="Use only the first so many rows; none means all.")
    source_weights: dict[str, Annotated[float, Field(ge=0, le=1e9)]] = Field(
        default_factory=dict,
        description="Source to its share of the sampled prompts, relative to the others; without it each row counts the same.",
    )

    def problems(self) -> Iterator[Problem]:
        if self.source_weights and not any(self.source_weights.values()):
            yield Problem("source_weights", "must have a weight above 0, got none: no prompt would be sampled.")

    def idle(self) -> Iterator[Idle]:
        if self.max_prompts == 1:
            yield Idle("shuffle", "cannot act with max_prompts = 1: there is one prompt to order")


class _FileOptions(_PromptOptions):
    path: str = Field(description="The file.")
    prompt_key: str = Field(default="prompt", description="Column of the prompt: text, or a list of messages.")
    label_key: str = Field(
        default="label", description="Column of the right answer, handed to the scorer; may be absent."
    )
    metadata_key: str = Field(
        default="metadata", description="Column of anything else a scorer may want; may be absent."
    )
    source_key: str = Field(
        default="source",
        description="Column that names where a row comes from; each source has a reward metric of its own. May be absent.",
    )


class JSONLOptions(_FileOptions):
    """Prompts from a file with one JSON object a line."""

    kind: Literal["jsonl"] = "jsonl"
    skip_bad_lines: bool = Field(
        default=False, description="Leave broken lines out, with a count, instead of stopping."
    )


class ParquetOptions(_FileOptions):
    """Prompts from a Parquet file."""

    kind: Literal["parquet"] = "parquet"


class ReasoningGymOptions(_PromptOptions):
    """Tasks that reasoning-gym generates and scores. Needs the extra: pip install 'strop[tasks]'."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    name: str = Field(description="Name of the dataset, such as chain_sum.")
    size: int = Field(default=1000, ge=1, description="How many tasks to generate.")
    task_seed: int = Field(default=0, ge=0, description="Seed of the generated tasks; another one for held-out tasks.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Further settings of the dataset, by its own names."
    )

    def idle(self) -> Iterator[Idle]:
        yield Idle("source_weights", "cannot act: all tasks are of one source, the dataset")
        if self.size == 1:
            yield Idle("shuffle", "cannot act with size = 1: there is one prompt to order")
        else:
            yield from super().idle()


DataOptions = Annotated[JSONLOptions | ParquetOptions | ReasoningGymOptions, Field(discriminator="kind")]


class DemonstrationOptions(Options):
    """Demonstrations for `strop sft`: conversations, or prompts with the response to learn."""

    kind: Literal["jsonl", "parquet"] = Field(default="jsonl", description="One JSON object a line, or Parquet.")
    path: str = Field(description="The file.")
    messages_key: str = Field(
        default="messages",
        description="Column of a conversation: a list of messages. Rows without it have a prompt and a response.",
    )
    prompt_key: str = Field(default="prompt", description="Column of the prompt: text, or a list of messages.")
    response_key: str = Field(
        default="response",
        description="Column of the response text; its end token is added: that of the chat template, or the tokenizer's.",
    )
    train_on: Literal["assistant", "last", "all"] = Field(
        default="assistant",
        description="What of a conversation is learned: all turns of the assistant, its last one, or every token. "
        '"train" or "step_loss_mask" of a message (true, false, 1, 0) overrules it.',
    )
    chat: Literal["auto", "always", "never"] = Field(default="auto", description="As in strop train.")
    system_prompt: str | None = Field(default=None, description="A system message before each prompt; none means none.")
    max_rows: int | None = Field(default=None, ge=1, description="Use only the first so many rows; none means all.")
    max_length_tokens: int | None = Field(
        default=None, ge=2, description="Longest demonstration; none means as long as the model has positions."
    )
    too_long: Literal["error", "drop", "truncate"] = Field(
        default="error",
        description="What becomes of a longer demonstration: an error, left out, or cut at its end; the last two counted.",
    )
    shuffle: bool = Field(default=True, description="A new order for every pass over the data, from the seed.")
    skip_bad_lines: bool = Field(
        default=False, description="Leave broken lines out, with a count, instead of stopping."
    )
    batch_size: int = Field(default=64, ge=1, description="Demonstrations per optimizer step.")

    def idle(self) -> Iterator[Idle]:
        if self.kind == "parquet":
            yield Idle("skip_bad_lines", "cannot act: a Parquet file has no lines")
