"""One prompt, text or messages, becomes the token ids that the model reads."""

from __future__ import annotations

from typing import Any

from strop.types import ConfigError, DataError

MAX_PROMPT_CHARS = 10_000_000  # beyond any model's context; tokenizing more could take all memory


def encode_prompt(
    tokenizer: Any, prompt: Any, *, chat: str, system_prompt: str | None, where: str, table: str = "data"
) -> tuple[str, tuple[int, ...]]:
    """Tokenise one prompt, through the tokenizer's chat template or as it is.

    A templated prompt is rendered with the head of the assistant's turn at its end and tokenised once, without special
    tokens: the template writes those itself. Plain text gets the special tokens that the tokenizer adds by default,
    except an end token after it.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prompt: text, or a list of messages, each a dict with the texts "role" and "content".
        chat: "auto": the template for messages, and for text where the tokenizer has one; "always"; "never".
        system_prompt: a system message that goes before; None means none.
        where: the file and line, with which an error message begins.
        table: of the config, which messages name.

    Returns:
        The text as the model reads it, and its token ids.

    Raises:
        ConfigError: `chat` or `system_prompt` cannot be obeyed.
        DataError: the prompt is neither text nor messages, the template refuses it, or it has no tokens.
    """
    messages = prompt_messages(prompt, where)
    if is_templated(tokenizer, prompt, chat, where, table):
        text = render(tokenizer, with_system(messages, system_prompt, where, table), where, add_generation_prompt=True)
        tokens = tokenizer.encode(text, add_special_tokens=False)
    elif system_prompt is not None:
        raise ConfigError(
            f"{table}.system_prompt must be unset where no chat template is used, got {system_prompt!r}. "
            f'Set {table}.chat = "always" with a tokenizer that has a template, or write the text into the prompts.'
        )
    else:
        text, tokens = prompt, _without_added_end(tokenizer, prompt)
    if not tokens:
        raise DataError(f"{where}: the prompt has no tokens.")
    return text, tuple(tokens)


def prompt_messages(prompt: Any, where: str) -> list[dict[str, Any]]:
    """A prompt as messages; text is what the user says. What is no prompt, or too long for one, is a DataError."""
    _check_prompt(prompt, where)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    length = sum(len(message["content"]) for message in messages)
    if length > MAX_PROMPT_CHARS:
        raise DataError(f"{where}: the prompt must have at most {MAX_PROMPT_CHARS} characters, got {length}.")
    return messages


def _check_prompt(prompt: Any, where: str) -> None:
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list):
        raise DataError(f"{where}: the prompt must be text or a list of messages, got {type(prompt).__name__}.")
    if not prompt:
        raise DataError(f"{where}: the prompt is an empty list of messages.")
    for number, message in enumerate(prompt):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(f'{where}: message {number} must be an object with "role" and "content", got {message!r}.')
        for key in ("role", "content"):
            if not isinstance(message[key], str):
                kind = type(message[key]).__name__
                raise DataError(f'{where}: "{key}" of message {number} must be text, got {kind}.')
    if prompt[-1]["role"] == "assistant":
        raise DataError(f"{where}: the last message is the assistant's. A prompt ends before the answer.")


def is_templated(tokenizer: Any, prompt: Any, chat: str, where: str, table: str = "data") -> bool:
    """Whether a prompt, text or messages, goes through the tokenizer's chat template.

    Raises:
        ConfigError: `chat` cannot be obeyed.
        DataError: it is messages, and there is no template.
    """
    is_text, has_template = isinstance(prompt, str), bool(tokenizer.chat_template)
    if chat == "never":
        if not is_text:
            raise ConfigError(
                f'{table}.chat must be "auto" or "always" for prompts that are messages, got "never" ({where}).'
            )
        return False
    if chat == "always" and not has_template:
        raise ConfigError(
            f'{table}.chat must be "auto" or "never" with a tokenizer that has no chat template, got "always". '
            "Add a chat_template.jinja to the model folder, or take text prompts as they are."
        )
    if not is_text and not has_template:
        raise DataError(f"{where}: the prompt is messages, but the tokenizer has no chat template. Write it as text.")
    return has_template


def with_system(
    messages: list[dict[str, Any]], system_prompt: str | None, where: str, table: str = "data"
) -> list[dict[str, Any]]:
    """The messages after a system message; one that brings its own is a DataError."""
    if system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise DataError(
            f"{where}: the prompt brings its own system message {messages[0]['content']!r} beside "
            f"{table}.system_prompt = {system_prompt!r}. Remove one of the two."
        )
    return [{"role": "system", "content": system_prompt}, *messages]


def render(tokenizer: Any, messages: list[dict[str, Any]], where: str, *, add_generation_prompt: bool) -> str:
    """The messages as text, with the head of the assistant's next turn at the end or without."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except Exception as error:  # a template may raise anything, most often that it knows no such role
        raise DataError(f"{where}: the chat template refuses the prompt, {error}") from error


def _without_added_end(tokenizer: Any, text: str) -> list[int]:
    """The tokens with the special ones that the tokenizer adds, except end tokens after the text."""
    end, bare, tokens = tokenizer.eos_token_id, tokenizer.encode(text, add_special_tokens=False), tokenizer.encode(text)
    while end is not None and _num_trailing(tokens, end) > _num_trailing(bare, end):
        tokens = tokens[:-1]
    return tokens


def _num_trailing(tokens: list[int], token: int) -> int:
    return next((n for n, other in enumerate(reversed(tokens)) if other != token), len(tokens))
