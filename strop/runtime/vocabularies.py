"""Whether a teacher reads and ends as the student does: token ids must mean the same to both, or its numbers mean nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from strop.runtime.models import LoadedModel
from strop.types import ModelError

_CHUNK = 4096  # tokens whose text is compared at once
_SHOWN = 3  # tokens that a message names


def check_same_vocabulary(student: LoadedModel, teacher: LoadedModel, *, named: str) -> None:
    """Compare the vocabularies token by token. The teacher may know more tokens; the student never samples them.

    Raises:
        ModelError: with the first tokens that differ, or with the end tokens of both where they share none.
    """
    ours, theirs = _tokens(student.tokenizer), _tokens(teacher.tokenizer)
    differ = sorted(token for token in ours if theirs.get(token) != ours[token])
    if differ:
        shown = ", ".join(f"{i} ({ours[i]!r}, teacher: {_shown(theirs.get(i))})" for i in differ[:_SHOWN])
        more = f" and {len(differ) - _SHOWN} more" if len(differ) > _SHOWN else ""
        raise ModelError(f"{named} must have the vocabulary of the model; these token ids differ: {shown}{more}.")
    if not student.stop_token_ids & teacher.stop_token_ids:
        ends = [sorted(loaded.stop_token_ids) for loaded in (student, teacher)]
        raise ModelError(
            f"{named} must end responses as the model does, with token {' or '.join(map(str, ends[0]))}; it ends them with "
            f"{' or '.join(map(str, ends[1]))}, and would teach never to end. Use another teacher, or set eos_token_id in the "
            "generation_config.json of one of them."
        )


def _tokens(tokenizer: Any) -> dict[int, str]:
    return {place: token for token, place in tokenizer.get_vocab().items()}


def _shown(token: str | None) -> str:
    return "none" if token is None else repr(token)


def check_same_texts(
    student: LoadedModel, detokenize: Callable[[Sequence[int]], str], *, named: str, chunk: int = _CHUNK
) -> None:
    """Compare the text of every token id with what a server makes of it; of its vocabulary there is nothing else to see.

    Raises:
        ModelError: with the first token that differs.
    """
    ids = sorted(student.tokenizer.get_vocab().values())

    def differ(part: Sequence[int]) -> bool:
        return student.tokenizer.decode(part, skip_special_tokens=False) != detokenize(part)

    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        if not differ(part):
            continue
        while len(part) > 1 and any(differ(half) for half in _halves(part)):
            part = next(half for half in _halves(part) if differ(half))
        ours, theirs = student.tokenizer.decode(part, skip_special_tokens=False), detokenize(part)
        which = f"token id {part[0]}" if len(part) == 1 else f"token ids {part[0]} to {part[-1]} in a row"
        raise ModelError(
            f"{named} must have the vocabulary of the model; {which} {'is' if len(part) == 1 else 'are'} {ours[:80]!r} for the "
            f"model and {theirs[:80]!r} for the teacher."
        )


def _halves(part: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    return part[: len(part) // 2], part[len(part) // 2 :]
