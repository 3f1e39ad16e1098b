"""$((...)): whole numbers, calculated as bash does."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

_NUMBER = re.compile(r"[+-]?(?:0|[1-9]\d{0,17})")
_WRITTEN = re.compile(r"[\s\d()+\-*/%<>=!~&|^]*")
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),  # towards 0, where Python goes down
    ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
    ast.Pow: operator.pow,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def is_number(text: str) -> bool:
    """Whether a text is a whole number as a sum takes it; 010 is none, since bash counts it in eights."""
    return _NUMBER.fullmatch(text.strip()) is not None


def result(written: str) -> int | None:
    """The result of a sum of numbers; None where it has names or operators that strop does not calculate.

    >>> result("(7 + 1) / 3 * 4"), result("-7 / 2"), result("5 >= 3"), result("N * 4"), result("1 / 0")
    (8, -3, 1, None, None)
    """
    if not _WRITTEN.fullmatch(written) or len(written) > 200 or re.search(r"\b0\d", written):
        return None
    try:
        value = _value(ast.parse(written.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, MemoryError, RecursionError):
        return None
    return value if abs(value) < 2**63 else None


def _value(node: ast.expr) -> int:
    """The value of a part of a sum.

    Raises:
        ValueError: it is none that strop calculates.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        return -_value(node.operand) if isinstance(node.op, ast.USub) else _value(node.operand)
    if isinstance(node, ast.BinOp):
        left, kind, right = node.left, type(node.op), node.right
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, kind, right = node.left, type(node.ops[0]), node.comparators[0]
    else:
        raise ValueError(type(node).__name__)
    a, b = _value(left), _value(right)
    if kind not in _OPERATORS or (kind is ast.Pow and not 0 <= b <= 64) or max(abs(a), abs(b)) >= 2**63:
        raise ValueError(kind.__name__)
    return int(_OPERATORS[kind](a, b))
