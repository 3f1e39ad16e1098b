"""rollouts/*.jsonl: sampled texts and their scores for reading, and all that training on them again takes.

One rollout a line: what a person reads first, then token ids. In the whole form lists with an entry per token have one for
each token that the policy wrote, in their order; elsewhere the value is known (log-probability 0, version -1, no reward).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from strop.types import DataError, Prompt, Rollout

Form = Literal["whole", "text"]
T = TypeVar("T")


def write_rollouts(
    path: Path, rollouts: Iterable[Rollout], *, form: Form = "whole", blamed: Mapping[str, str] | None = None
) -> None:
    """Write one rollout a line.

    Args:
        path: the file, written whole or not at all.
        rollouts: scored or not.
        form: "text" leaves out everything that is there for a machine.
        blamed: what a guard says of a rollout, by its name; a line of such a rollout has it as "guard".
    """
    beside = path.with_name(f".{path.name}.new")
    with beside.open("w", encoding="utf-8") as file:
        for rollout in rollouts:
            row = _for_people(rollout) | (_for_machines(rollout) if form == "whole" else {})
            if rollout.name in (blamed or {}):
                row = {"guard": (blamed or {})[rollout.name], **row}
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    beside.replace(path)


def _for_people(r: Rollout) -> dict[str, Any]:
    """What was asked, what was answered, what it earned."""
    optional = {
        "source": r.prompt.source,
        "reward_parts": None if r.reward_parts is None else dict(r.reward_parts),
        "length_penalty": r.length_penalty,  # part of the reward
    }
    return {
        "prompt_row": r.prompt.row,
        "sample": r.sample,
        "prompt": r.prompt.text,
        "response": r.text,
        "label": r.prompt.label,
        "reward": r.reward,
        "excluded": r.excluded,
        "finish_reason": r.finish_reason,
        "num_response_tokens": r.num_response_tokens,
        **{name: value for name, value in optional.items() if value is not None},
    }


def _for_machines(r: Rollout) -> dict[str, Any]:
    token_rewards = {} if r.token_rewards is None else {"token_rewards": _written(r.token_rewards, r.response_mask)}
    return {
        **({"metadata": dict(r.prompt.metadata)} if r.prompt.metadata else {}),
        **token_rewards,
        "group": r.group_id,
        "prompt_length": len(r.prompt.tokens),
        "response_spans": _spans(r.response_mask),  # [from, up to and not including], places in tokens
        "tokens": r.tokens,
        "rollout_logprobs": [_short(x) for x in _written(r.rollout_logprobs, r.response_mask)],
        "policy_versions": _written(r.policy_versions, r.response_mask),
    }


def _written(values: Sequence[T], mask: Sequence[bool]) -> list[T]:
    """The entries of the tokens that the policy wrote."""
    return [value for value, is_written in zip(values, mask, strict=True) if is_written]


def _spans(mask: Sequence[bool]) -> list[list[int]]:
    """[[2, 4]] for F F T T."""
    edges = [
        place
        for place in range(len(mask) + 1)
        if (place > 0 and mask[place - 1]) != (place < len(mask) and mask[place])
    ]
    return [list(pair) for pair in zip(edges[::2], edges[1::2], strict=True)]


def _short(x: float) -> float:
    """A number that becomes the same float32 as `x`, with no more digits than that takes."""
    return float(str(np.float32(x)))


def read_rollouts(path: Path) -> list[Rollout]:
    """What `write_rollouts` wrote in its whole form: the same tokens, log-probabilities (as float32) and rewards.

    Raises:
        DataError: the file is missing or broken, with the line, or was written without what a machine needs.
    """
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")  # splitlines splits within texts too
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: the rollouts cannot be read: {error}.") from error
    return [_read_line(path, number, line) for number, line in enumerate(lines, 1) if line or len(lines) > 1]


def _read_line(path: Path, number: int, line: str) -> Rollout:
    try:
        row = dict(json.loads(line))
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path}:{number}: the line must be a JSON object, got {line[:40]!r}: {error}.") from error
    if "reward" in row and "tokens" not in row:
        raise DataError(
            f"{path}:{number}: the line must have tokens to be trained on, got text alone. Such files are written with "
            "run.rollout_form = text; record with run.rollout_form = whole."
        )
    try:
        return _rollout(row)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}:{number}: the line must be a rollout as strop writes them: {type(error).__name__}: {error}."
        ) from error


def _rollout(row: Mapping[str, Any]) -> Rollout:
    tokens = tuple(int(token) for token in row["tokens"])
    places = [place for start, end in row["response_spans"] for place in range(start, end)]
    if places and (min(places) < 0 or max(places) >= len(tokens)):
        raise ValueError(f"response_spans reach beyond {len(tokens)} tokens")

    def spread(values: Iterable[T], elsewhere: T) -> tuple[T, ...]:
        found = [elsewhere] * len(tokens)
        for place, value in zip(places, values, strict=True):
            found[place] = value
        return tuple(found)

    prompt = Prompt(
        row=int(row["prompt_row"]),
        tokens=tokens[: int(row["prompt_length"])],
        text=row["prompt"],
        label=row["label"],
        source=row.get("source"),
        metadata=row.get("metadata", {}),
    )
    reward, given = row["reward"], row.get("token_rewards")
    return Rollout(
        prompt=prompt,
        group_id=int(row["group"]),
        sample=int(row["sample"]),
        tokens=tokens,
        response_mask=spread([True] * len(places), False),
        rollout_logprobs=spread((float(np.float32(x)) for x in row["rollout_logprobs"]), 0.0),
        policy_versions=spread((int(v) for v in row["policy_versions"]), -1),
        finish_reason=row["finish_reason"],
        text=row["response"],
        reward_parts=row.get("reward_parts"),
        token_rewards=None if given is None else spread(given, None),
        reward=None if reward is None else float(reward),
        excluded=row["excluded"],
        length_penalty=row.get("length_penalty"),
    )


def step_files(folder: Path) -> Iterator[tuple[int, Path]]:
    """The files of training steps in a folder, each with its step, in their order."""
    found = [(path.stem.removeprefix("step_"), path) for path in folder.glob("step_*.jsonl")]
    yield from sorted((int(number), path) for number, path in found if number.isdigit())
