"""Where the messages of a conversation stand in its rendered text.

That is never guessed from the text. A template with {% generation %} says it itself; of any other, beginnings of the
conversation are rendered, and each must be how the whole conversation begins.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from strop.data.chat import render
from strop.types import DataError

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a row, and what is asked of them."""

    turns: list[dict[str, Any]]  # as in the row, without flags
    flags: list[bool | None]  # what each says of its being learned
    whole: list[dict[str, Any]]  # as they are rendered: perhaps after a system message that an option adds
    train_on: str
    table: str  # of the config, for messages
    where: str

    @property
    def answers(self) -> list[int]:
        return [i for i, turn in enumerate(self.turns) if turn["role"] == "assistant"]

    @property
    def chosen(self) -> Sequence[int]:
        """The messages that train_on names."""
        return {"assistant": self.answers, "last": self.answers[-1:], "all": range(len(self.turns))}[self.train_on]

    @property
    def learned(self) -> list[int]:
        chosen = self.chosen
        return [i for i, flag in enumerate(self.flags) if (i in chosen if flag is None else flag)]

    def place(self, turn: int) -> int:
        """Of a message of the row, in `whole`."""
        return turn + len(self.whole) - len(self.turns)


@dataclass(frozen=True, slots=True)
class Span:
    """The part of the rendered text that one message is."""

    turn: int  # the message's place in the row
    start: int
    end: int
    is_answer: bool  # begins after the head of the assistant's turn and ends with an end token


def learned_spans(tokenizer: Any, talk: Conversation) -> tuple[str, list[Span]]:
    """The rendered text, and of each learned message what the model would have to say.

    Raises:
        DataError: the template renders a message otherwise once others follow, so that there is no telling where it is.
    """
    if marks_answers(tokenizer) and set(talk.learned) <= set(talk.answers):
        return _marked_spans(tokenizer, talk)
    text = render(tokenizer, talk.whole, talk.where, add_generation_prompt=False)
    return text, [_span(tokenizer, talk, turn, text, is_answer=turn in talk.answers) for turn in talk.learned]


def unlearned_spans(tokenizer: Any, talk: Conversation) -> tuple[str, list[Span]]:
    """The rendered text, and each message that is not learned with all that the template writes for it, its head too.

    Raises:
        DataError: as `learned_spans`.
    """
    text = render(tokenizer, talk.whole, talk.where, add_generation_prompt=False)
    unlearned = [turn for turn in range(len(talk.turns)) if turn not in talk.learned]
    return text, [_span(tokenizer, talk, turn, text, is_answer=False) for turn in unlearned]


# ---- by the template's own marks ------------------------------------------------------------------------------------


def marks_answers(tokenizer: Any) -> bool:
    """Whether the template says with {% generation %} where the turns of the assistant are."""
    template = tokenizer.chat_template
    return isinstance(template, str) and bool(_MARK.search(template))


def _marked_spans(tokenizer: Any, talk: Conversation) -> tuple[str, list[Span]]:
    """From {% generation %}, whose stretches are the turns of the assistant one after the other. Of transformers' mask of
    tokens only these characters are taken: it has whole the tokens that reach over the beginning of a stretch, and with
    them a part of the turn's head."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, stretches = render_jinja_template(
            conversations=[talk.whole],
            chat_template=tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    except Exception as error:  # a template may raise anything
        raise DataError(f"{talk.where}: the chat template refuses the conversation, {error}") from error
    (text,), (places,) = texts, stretches
    if len(places) != len(talk.answers):
        raise DataError(
            f"{talk.where}: the chat template marks {len(places)} stretches with {{% generation %}}, and the conversation "
            f"has {len(talk.answers)} turns of the assistant. There is no telling which is which."
        )
    found = [Span(turn, *place, is_answer=True) for turn, place in zip(talk.answers, places, strict=True)]
    return text, [span for span in found if span.turn in talk.learned]


# ---- by beginnings of the conversation ------------------------------------------------------------------------------


def _span(tokenizer: Any, talk: Conversation, turn: int, text: str, *, is_answer: bool) -> Span:
    at, where = talk.place(turn), talk.where
    after = render(tokenizer, talk.whole[: at + 1], where, add_generation_prompt=False)
    if at or is_answer:
        before = render(tokenizer, talk.whole[:at], where, add_generation_prompt=is_answer)
    else:
        before = after[: _start_of_first(tokenizer, talk.whole[0], after, where)]
    if not text.startswith(before):
        raise _not_found(tokenizer, talk, turn, before, text)
    if not text.startswith(after) or len(after) < len(before):
        consequence = "the model would learn what it never has to say"
        if turn not in talk.learned:
            consequence = "there is no telling which tokens are not to be learned"
        raise DataError(
            f"{where}: message {turn} ({talk.whole[at]['role']}) is rewritten by the chat template once others follow "
            f"({_difference(after, text)}), so {consequence}. {advice(talk, turn)}"
        )
    return Span(turn, len(before), len(after), is_answer)


def _start_of_first(tokenizer: Any, first: dict[str, Any], alone: str, where: str) -> int:
    """How many characters a template writes of its own before the first message: <s>, and a system prompt of its own.

    What it writes for the same message later on in a conversation is that message's. Where this does not show, as for a
    system message, which stands first only, everything after <s> is.
    """
    start = tokenizer.bos_token or ""
    bare = len(start) if alone.startswith(start) else 0
    if first["role"] == "system":
        return bare
    talk = [first, {"role": "assistant", "content": "a"}]
    try:
        before = render(tokenizer, talk, where, add_generation_prompt=False)
        again = render(tokenizer, [*talk, first], where, add_generation_prompt=False)
    except DataError:  # a template that wants no message twice
        return bare
    own = again.removeprefix(before)
    return len(alone) - len(own) if again.startswith(before) and alone.endswith(own) else bare


def _not_found(tokenizer: Any, talk: Conversation, turn: int, before: str, text: str) -> DataError:
    at, what = talk.place(turn), "the chat template renders what stands before it otherwise once it follows"
    todo = advice(talk, turn)
    if turn in talk.learned and text.startswith(
        render(tokenizer, talk.whole[:at], talk.where, add_generation_prompt=False)
    ):
        what = "the head of an answer that the chat template writes when a model is sampled is not that of this turn"
        missing = before[_parting(before, text) :]
        said = talk.whole[at] | {"content": missing + talk.whole[at]["content"]}
        begun = [*talk.whole[:at], said, *talk.whole[at + 1 :]]
        if render(tokenizer, begun, talk.where, add_generation_prompt=False).startswith(before):
            todo = f"Begin its content with {missing!r}, as the model's answers begin. Or: {todo}"
    return DataError(
        f"{talk.where}: message {turn} cannot be found in the rendered conversation: {what} "
        f"({_difference(before, text)}). {todo}"
    )


def advice(talk: Conversation, turn: int) -> str:
    """What a user can do about a message that the template does not render so that it can be learned, or left out."""
    ways = []
    if turn not in talk.learned:
        ways += [f'take the "train" or "step_loss_mask" of message {turn} away', f'set {talk.table}.train_on = "last"']
    elif talk.flags[turn]:
        ways.append(f'set the "train" or "step_loss_mask" of message {turn} to false')
    elif turn in talk.answers[:-1]:
        ways.append(f'set {talk.table}.train_on = "last"')
    if turn in talk.learned and turn < len(talk.turns) - 1:
        ways.append("give every turn that is to be learned a row of its own, as its last message")
    if not ways:
        ways.append("use a chat template without this (chat_template.jinja in the model's folder)")
        ways.append(f'write prompt and response out as text, with {talk.table}.chat = "never"')
    ways[0] = ways[0][0].upper() + ways[0][1:]
    return ", or ".join(ways) + "."


def _parting(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    differ = (i for i in range(min(len(one), len(other))) if one[i] != other[i])
    return next(differ, min(len(one), len(other)))


def _difference(one: str, other: str, width: int = 24) -> str:
    """Where two texts part, in words."""
    place = _parting(one, other)
    return f"{one[place : place + width]!r} alone, {other[place : place + width]!r} in the whole"
