"""A conversation becomes one sequence of tokens, with a mask of those that are learned.

Of a turn of the assistant are learned the tokens that the model would have to sample: those after the head of the turn, up
to its end token. With train_on = "all" it is every token but those of messages that say that they are not learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from strop.data.chat import is_templated, with_system
from strop.data.spans import Conversation, Span, advice, learned_spans, marks_answers, unlearned_spans
from strop.types import DataError

# What a message says of itself: strop's word, and the one of slime.
_FLAGS = ("train", "step_loss_mask")


def encode_conversation(
    tokenizer: Any,
    messages: Any,
    *,
    train_on: str,
    chat: str,
    system_prompt: str | None,
    where: str,
    table: str = "data",
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Tokenise a conversation and say which of its tokens are learned.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        messages: a list of messages, each a dict with the texts "role" and "content", and what else the template reads.
            "train" (or slime's "step_loss_mask") of a message, true or false, 1 or 0, overrules train_on.
        train_on: "assistant": all turns of the assistant; "last": its last one; "all": every token.
        chat: as in `encode_prompt`; "never" is an error here.
        system_prompt: a system message that goes before; None means none.
        where: the file and line, with which an error message begins.
        table: of the config, which messages name.

    Returns:
        Token ids, and for each whether it is learned.

    Raises:
        ConfigError: `chat` cannot be obeyed.
        DataError: the messages are not usable, nothing of them is learned, or the template renders a turn otherwise once
            others follow, so that there is no telling where it is.
    """
    turns, flags = _read_messages(messages, where)
    is_templated(tokenizer, turns, chat, where, table)
    talk = Conversation(turns, flags, with_system(turns, system_prompt, where, table), train_on, table, where)
    if not talk.learned:
        raise _nothing_learned(talk)
    if train_on == "all":
        tokens, mask = _all_but(tokenizer, *unlearned_spans(tokenizer, talk), talk)
    else:
        tokens, mask = _only(tokenizer, *learned_spans(tokenizer, talk), talk)
    if not any(mask):
        raise DataError(f"{where}: no token is learned: the chat template renders nothing of the turns that are.")
    return tuple(tokens), tuple(mask)


def _read_messages(messages: Any, where: str) -> tuple[list[dict[str, Any]], list[bool | None]]:
    """The messages as the template reads them, and what each says of its being learned."""
    if not isinstance(messages, list) or not messages:
        given = "an empty list" if messages == [] else type(messages).__name__
        raise DataError(f"{where}: a conversation must be a list of messages, got {given}.")
    turns, flags = [], []
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise DataError(f'{where}: message {number} must be an object with "role" and "content", got {message!r}.')
        found = {name: value for name, value in message.items() if value is not None}  # Parquet fills columns with null
        flags.append(_flag(found, number, where))
        turn = {name: value for name, value in found.items() if name not in _FLAGS}
        if "tool_calls" in turn:
            turn.setdefault("content", "")  # OpenAI's null
        for name in ("role", "content"):
            if not isinstance(turn.get(name), str):
                kind = type(turn[name]).__name__ if name in turn else "none"
                raise DataError(f'{where}: "{name}" of message {number} must be text, got {kind}.')
        turns.append(turn)
    return turns, flags


def _flag(message: dict[str, Any], number: int, where: str) -> bool | None:
    given = {name: message[name] for name in _FLAGS if name in message}
    for name, value in given.items():
        if value not in (0, 1):  # True and False among them
            raise DataError(f'{where}: "{name}" of message {number} must be true, false, 1 or 0, got {value!r}.')
    if len({bool(value) for value in given.values()}) > 1:
        raise DataError(f"{where}: {' and '.join(given)} of message {number} must agree, got {given}.")
    return bool(next(iter(given.values()))) if given else None


def _nothing_learned(talk: Conversation) -> DataError:
    said = f"{talk.where}: no message is learned. {talk.table}.train_on = {talk.train_on!r}"
    if not talk.chosen:
        return DataError(f"{said}, and the conversation has no turn of the assistant. Leave the row out.")
    named = ", ".join(map(str, talk.chosen))
    return DataError(
        f'{said} names message {named}, and "train" or "step_loss_mask" there says false. Take the flag away, or leave the '
        "row out."
    )


# ---- from characters to tokens --------------------------------------------------------------------------------------


def _all_but(tokenizer: Any, text: str, spans: Sequence[Span], talk: Conversation) -> tuple[list[int], list[bool]]:
    """The tokens of the text, and which of them lie in no span; an answer that ends the text gets an end token."""
    tokens, place = _encode_with_edges(tokenizer, text, spans, talk.where)
    mask = [True] * len(tokens)
    for span in spans:
        start, stop = place[span.start], place[span.end]
        mask[start:stop] = [False] * (stop - start)
    last = len(talk.turns) - 1
    is_open = _end_of_turn(tokenizer, tokens, special_ids(tokenizer)) is None
    if is_open and last in talk.answers and last in talk.learned:
        tokens.append(tokenizer.eos_token_id)
        mask.append(True)
    return tokens, mask


def _only(tokenizer: Any, text: str, spans: Sequence[Span], talk: Conversation) -> tuple[list[int], list[bool]]:
    """The tokens of the text, and which of them lie in a span; an answer's up to its end token."""
    tokens, place = _encode_with_edges(tokenizer, text, spans, talk.where)
    mask, ends = [False] * len(tokens), special_ids(tokenizer)
    for span in spans:
        start, stop = place[span.start], place[span.end]
        if span.is_answer:
            end = _end_of_turn(tokenizer, tokens[start:stop], ends)
            if end is None and stop == len(tokens):
                tokens.append(tokenizer.eos_token_id)
                mask.append(False)
                end = stop + 1 - start
            elif end is None and marks_answers(tokenizer) and tokens[stop] in ends:  # marked without its end token
                end = stop + 1 - start
            if end is None:
                raise _no_end(talk, span.turn)
            stop = start + end
        mask[start:stop] = [True] * (stop - start)
    return tokens, mask


def _encode_with_edges(
    tokenizer: Any, text: str, spans: Sequence[Span], where: str
) -> tuple[list[int], dict[int, int]]:
    """The tokens of a text and the number of them before each edge of a span, characters from its beginning.

    Tokens are those of the whole text. Only where one reaches over an edge is the text cut there, as it is when the model
    samples: what comes before the edge is tokenised without knowledge of what follows.
    """
    edges = sorted({0, len(text), *(s.start for s in spans), *(s.end for s in spans)})
    tokens, pieces = _encode(tokenizer, text), [_encode(tokenizer, text[a:b]) for a, b in pairwise(edges)]
    joined = [token for piece in pieces for token in piece]
    if joined != tokens:
        heads = {edge: _encode(tokenizer, text[:edge]) for edge in edges}
        if all(tokens[: len(head)] == head for head in heads.values()):
            return tokens, {edge: len(head) for edge, head in heads.items()}
        if tokenizer.decode(joined) != tokenizer.decode(tokens):  # a piece alone is not read as it is within the text
            raise DataError(f"{where}: the tokenizer merges the beginning or end of a turn with what stands beside it.")
    place, count = {edges[0]: 0}, 0
    for edge, piece in zip(edges[1:], pieces, strict=True):
        count += len(piece)
        place[edge] = count
    return joined, place


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


# ---- the end of a turn ----------------------------------------------------------------------------------------------


def special_ids(tokenizer: Any) -> set[int]:
    """The ids of all special tokens, those that the tokenizer only has as additional ones among them."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def _end_of_turn(tokenizer: Any, tokens: Sequence[int], ends: set[int]) -> int | None:
    """How many of a turn's tokens there are up to its end token, after which only white space may stand; None without one."""
    last = max((i for i, token in enumerate(tokens) if token in ends), default=None)
    if last is None or tokenizer.decode(list(tokens[last + 1 :])).strip():
        return None
    return last + 1


def _no_end(talk: Conversation, turn: int) -> DataError:
    return DataError(
        f"{talk.where}: message {turn} has no end token: the chat template writes none after the assistant's turn, and a model "
        f"that learns this never ends its turn. {advice(talk, turn)}"
    )
