"""The tests that a label gives a program."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from strop.rewards.label import LabelError

_INPUT = ("input", "stdin")
_OUTPUT = ("output", "stdout")
_FORMS = (
    'a list of {"input": ..., "output": ...} or of Python asserts as text, or {"inputs": [...], "outputs": [...]}, or Python '
    "code that asserts"
)


@dataclass(frozen=True, slots=True)
class CodeTest:
    """One test: code that asserts (`code`), or what a program prints (`stdout`) when it reads `stdin`."""

    code: str | None = None
    stdin: str = ""
    stdout: str = ""


def code_label(label: Any) -> tuple[CodeTest, ...]:
    """The tests of a label, which is one of

    * a list, each entry of which is a text of Python code that asserts, or an object with `input` and `output` (or `stdin`
      and `stdout`), as text or as a list of lines;
    * an object with the lists `inputs` and `outputs`, of the same length;
    * text: either of them as JSON, or else Python code that asserts.

    >>> code_label('[{"input": "2 3", "output": "5"}]')
    (CodeTest(code=None, stdin='2 3', stdout='5'),)
    >>> code_label("assert add(2, 3) == 5")
    (CodeTest(code='assert add(2, 3) == 5', stdin='', stdout=''),)

    Raises:
        LabelError: it is none of these, or there is no test in it.
    """
    if isinstance(label, int | float) and not isinstance(label, bool):
        label = str(label)  # JSON of a text that happens to be a number
    given = _unpacked(label) if isinstance(label, str) else label
    tests = tuple(_read(given))
    if not tests:
        raise LabelError("there must be a test in the label for reward.kind = code, got none.")
    return tests


def _unpacked(text: str) -> Any:
    if text.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            pass  # it is code
    code = textwrap.dedent(text).strip()
    return [code] if code else []


def _read(given: Any) -> Iterator[CodeTest]:
    if isinstance(given, dict) and {"inputs", "outputs"} <= given.keys():
        inputs, outputs = given["inputs"], given["outputs"]
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise LabelError(
                "the lists inputs and outputs of a label must be as long as each other for reward.kind = code, got "
                f"{_length(inputs)} and {_length(outputs)}."
            )
        given = [{"input": one, "output": other} for one, other in zip(inputs, outputs, strict=True)]
    if not isinstance(given, list):
        raise LabelError(f"the label must be {_FORMS} for reward.kind = code, got {given!r:.200}.")
    for place, entry in enumerate(given):
        yield _read_one(entry, place)


def _read_one(entry: Any, place: int) -> CodeTest:
    if isinstance(entry, str) and entry.strip():
        return CodeTest(code=textwrap.dedent(entry).strip())
    if isinstance(entry, dict):
        found = [next((entry[name] for name in names if name in entry), None) for names in (_INPUT, _OUTPUT)]
        texts = ["\n".join(text) if _is_lines(text) else text for text in found]
        if isinstance(texts[0], str | None) and isinstance(texts[1], str):
            return CodeTest(stdin=texts[0] or "", stdout=texts[1])
    raise LabelError(f"test {place} of the label must be one for reward.kind = code, got {entry!r:.200}: {_FORMS}.")


def _is_lines(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(line, str) for line in value)


def _length(value: Any) -> str:
    return str(len(value)) if isinstance(value, list) else type(value).__name__
