"""A conversation becomes one sequence of tokens, with a mask of those that are learned.

Where a turn begins and ends is never guessed from the text. A template with {% generation %} says it itself; of any other,
beginnings of the conversation are rendered, and each must be how the whole conversation begins. Of a turn of the assistant
are learned the tokens that the model would have to sample: those after the head of the turn, up to its end token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from strop.data.chat import is_templated, render, with_system
from strop.types import DataError

# What a message says of itself: strop's word, and the one of slime.
_FLAGS = ("train", "step_loss_mask")
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OF_A_ROW_ALONE = (
    'Set data.train_on = "last", or give every turn that is to be learned a row of its own, as its last message'
)


@dataclass(frozen=True, slots=True)
class _Span:
    """The part of the rendered text that one message is, if it is learned."""

    turn: int  # the message's place in the row
    start: int
    end: int
    is_answer: bool  # of the assistant: ends with an end token


def encode_conversation(
    tokenizer: Any, messages: Any, *, train_on: str, chat: str, system_prompt: str | None, where: str
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

    Returns:
        Token ids, and for each whether it is learned.

    Raises:
        ConfigError: `chat` cannot be obeyed.
        DataError: the messages are not usable, nothing of them is learned, or the template renders a turn otherwise once
            others follow, so that there is no telling where it is.
    """
    turns, flags = _read_messages(messages, where)
    is_templated(tokenizer, turns, chat, where)
    learned = _learned_turns(turns, flags, train_on)
    if not learned:
        raise DataError(
            f"{where}: no message is learned. data.train_on = {train_on!r}: is there a turn of the assistant?"
        )
    num_added = 0 if system_prompt is None else 1
    whole = with_system(turns, system_prompt, where)
    if train_on == "all" and len(learned) == len(turns):
        text = render(tokenizer, whole, where, add_generation_prompt=False)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return tuple(tokens), (True,) * len(tokens)
    answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    if _marks_answers(tokenizer) and set(learned) <= set(answers):
        text, spans = _marked_spans(tokenizer, whole, learned, answers, where)
    else:
        text, spans = _rendered_spans(tokenizer, whole, learned, num_added, where)
    tokens, mask = _masked(tokenizer, text, spans, where)
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


def _learned_turns(turns: Sequence[dict[str, Any]], flags: Sequence[bool | None], train_on: str) -> list[int]:
    answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    chosen = {"assistant": answers, "last": answers[-1:], "all": range(len(turns))}[train_on]
    return [i for i, flag in enumerate(flags) if (i in chosen if flag is None else flag)]


# ---- by the template's own marks ------------------------------------------------------------------------------------


def _marks_answers(tokenizer: Any) -> bool:
    template = tokenizer.chat_template
    return isinstance(template, str) and bool(_MARK.search(template))


def _marked_spans(
    tokenizer: Any, whole: list[dict[str, Any]], learned: Sequence[int], answers: Sequence[int], where: str
) -> tuple[str, list[_Span]]:
    """The rendered text, and from {% generation %}, whose stretches are the turns of the assistant one after the other, where
    the learned ones stand. Of transformers' mask of tokens only these characters are taken: it has whole the tokens that
    reach over the beginning of a stretch, and with them a part of the turn's head."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, stretches = render_jinja_template(
            conversations=[whole],
            chat_template=tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    except Exception as error:  # a template may raise anything
        raise DataError(f"{where}: the chat template refuses the conversation, {error}") from error
    (text,), (places,) = texts, stretches
    if len(places) != len(answers):
        raise DataError(
            f"{where}: the chat template marks {len(places)} stretches with {{% generation %}}, and the conversation has "
            f"{len(answers)} turns of the assistant. There is no telling which is which."
        )
    found = [_Span(turn, *place, is_answer=True) for turn, place in zip(answers, places, strict=True)]
    return text, [span for span in found if span.turn in learned]


# ---- by beginnings of the conversation ------------------------------------------------------------------------------


def _rendered_spans(
    tokenizer: Any, whole: list[dict[str, Any]], learned: Sequence[int], num_added: int, where: str
) -> tuple[str, list[_Span]]:
    """The rendered text, and where each learned message begins and ends in it."""
    text = render(tokenizer, whole, where, add_generation_prompt=False)
    return text, [_span(tokenizer, whole, i, num_added, text, where) for i in learned]


def _span(tokenizer: Any, whole: list[dict[str, Any]], turn: int, num_added: int, text: str, where: str) -> _Span:
    at = turn + num_added
    is_answer = whole[at]["role"] == "assistant"
    before = render(tokenizer, whole[:at], where, add_generation_prompt=is_answer) if at or is_answer else ""
    after = render(tokenizer, whole[: at + 1], where, add_generation_prompt=False)
    if not text.startswith(before):
        what = "the chat template renders what stands before it otherwise once it follows"
        if is_answer and text.startswith(render(tokenizer, whole[:at], where, add_generation_prompt=False)):
            what = (
                "the head of an answer that the chat template writes when a model is sampled is not that of this turn"
            )
        raise DataError(
            f"{where}: message {turn} cannot be found in the rendered conversation: {what} "
            f"({_difference(before, text)}). {_OF_A_ROW_ALONE}."
        )
    if not text.startswith(after) or len(after) < len(before):
        raise DataError(
            f"{where}: message {turn} ({whole[at]['role']}) is rewritten by the chat template once others follow "
            f"({_difference(after, text)}), so the model would learn what it never has to say. {_OF_A_ROW_ALONE}."
        )
    return _Span(turn, len(before), len(after), is_answer)


def _difference(one: str, other: str, width: int = 24) -> str:
    """Where two texts part, in words."""
    differ = (i for i in range(min(len(one), len(other))) if one[i] != other[i])
    place = next(differ, min(len(one), len(other)))
    return f"{one[place : place + width]!r} alone, {other[place : place + width]!r} in the whole"


# ---- from characters to tokens --------------------------------------------------------------------------------------


def _masked(tokenizer: Any, text: str, spans: Sequence[_Span], where: str) -> tuple[list[int], list[bool]]:
    """The tokens of the text, and which of them lie in a span; an answer's up to its end token."""
    edges = sorted({0, len(text), *(s.start for s in spans), *(s.end for s in spans)})
    tokens, place = _encode_with_edges(tokenizer, text, edges, where)
    mask, ends = [False] * len(tokens), special_ids(tokenizer)
    for span in spans:
        start, stop = place[span.start], place[span.end]
        if span.is_answer:
            end = _end_of_turn(tokenizer, tokens[start:stop], ends)
            if end is None and stop == len(tokens):
                tokens.append(tokenizer.eos_token_id)
                mask.append(False)
                end = stop + 1 - start
            elif end is None and _marks_answers(tokenizer) and tokens[stop] in ends:  # marked without its end token
                end = stop + 1 - start
            if end is None:
                raise _no_end(where, span.turn)
            stop = start + end
        mask[start:stop] = [True] * (stop - start)
    return tokens, mask


def _encode_with_edges(tokenizer: Any, text: str, edges: Sequence[int], where: str) -> tuple[list[int], dict[int, int]]:
    """The tokens of a text and the number of them before each edge, characters from its beginning.

    Tokens are those of the whole text. Only where one reaches over an edge is the text cut there, as it is when the model
    samples: what comes before the edge is tokenised without knowledge of what follows.
    """
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


def _no_end(where: str, turn: int) -> DataError:
    return DataError(
        f"{where}: message {turn} has no end token: the chat template writes none after the assistant's turn, and a model that "
        f"learns this never ends its turn. {_OF_A_ROW_ALONE}."
    )
