"""What options there are, in words: the one source of `strop help`, the options page of the docs and the JSON Schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args, get_origin

import annotated_types
from pydantic_core import PydanticUndefined

from strop.config.base import Options
from strop.config.tree import Leaf, leaves, variants


class Entry(NamedTuple):
    """One option of one kind of its table."""

    path: str
    kind: str | None  # of its table, where that comes in several
    takes: str  # its type and range
    default: str
    description: str

    @property
    def table(self) -> str:
        return self.path.rpartition(".")[0]


_NOUNS = {int: "whole number", float: "number", bool: "true | false", str: "text"}


def entries(root: type[Options]) -> Iterator[Entry]:
    """Every option of a tree, in its order."""
    unions = {leaf.path for leaf in leaves(root) if leaf.name == "kind" and _kinds(root, leaf) > 1}
    for leaf in leaves(root):
        kind = leaf.kind if f"{leaf.path.rpartition('.')[0]}.kind" in unions else None
        text = leaf.field.description or (leaf.owner.__doc__ or "").partition("\n")[0]
        yield Entry(leaf.path, kind, takes(leaf), _default(leaf), text)


def _kinds(root: type[Options], leaf: Leaf) -> int:
    return len({other.kind for other in leaves(root) if other.path == leaf.path})


def takes(leaf: Leaf) -> str:
    """Type and range of an option.

    >>> from strop.config import TrainConfig
    >>> found = {leaf.path: leaf for leaf in leaves(TrainConfig)}
    >>> takes(found["trainer.beta1"]), takes(found["eval.max_response_tokens"])
    ('number, >= 0, < 1', 'whole number, >= 1 | none')
    """
    annotation = leaf.field.annotation
    parts = [part for part in get_args(annotation) if part is not type(None)]
    is_optional = type(None) in get_args(annotation)
    words = _words(parts[0] if is_optional else annotation)
    return ", ".join([words, *_bounds(leaf)]) + (" | none" if is_optional else "")


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"list of {_plural(get_args(kind)[0])}"
    return "table" if get_origin(kind) is dict else _NOUNS.get(kind, "table")


def _plural(kind: Any) -> str:
    """Of the entries of a list."""
    if hasattr(kind, "__metadata__"):
        return _plural(get_args(kind)[0])
    return {int: "whole numbers", float: "numbers", str: "texts"}.get(kind, _words(kind))


def _bounds(leaf: Leaf) -> Iterator[str]:
    signs = {annotated_types.Ge: (">=", "ge"), annotated_types.Gt: (">", "gt")}
    signs |= {annotated_types.Le: ("<=", "le"), annotated_types.Lt: ("<", "lt")}
    for constraint in leaf.field.metadata:
        if type(constraint) in signs:
            sign, name = signs[type(constraint)]
            yield f"{sign} {getattr(constraint, name):g}"


def _default(leaf: Leaf) -> str:
    value = leaf.field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return ""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(list(value)) if isinstance(value, tuple) else str(value)


def search(root: type[Options], words: str) -> list[Entry]:
    """The options whose path has the words, hyphens or dots between them or not; else those whose description does."""
    wanted = words.lower().lstrip("-").replace("-", "_").split()
    by_path = [e for e in entries(root) if all(word in e.path for word in wanted)]
    return by_path or [e for e in entries(root) if all(w in e.description.lower() for w in words.lower().split())]


def json_schema(root: type[Options]) -> dict[str, Any]:
    """JSON Schema of a config file, for completion and checks in an editor. None is written "none" in TOML."""
    schema = _as_in_toml(root.model_json_schema())
    for owner in tables_without_default_kind(root):
        schema["$defs"][owner.__name__]["required"] = ["kind", *schema["$defs"][owner.__name__].get("required", ())]
    for definition in schema["$defs"].values():
        kind = definition["properties"].get("kind", {})
        kind.setdefault("description", definition.get("description", "").partition("\n")[0])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": f"strop {root.__name__}"}


def tables_without_default_kind(root: type[Options]) -> list[type[Options]]:
    """Classes of the unions of which a table must say which kind it is, such as [data] and [reward]."""
    owners = dict.fromkeys([root, *(leaf.owner for leaf in leaves(root))])
    fields = [field for owner in owners for field in owner.model_fields.values()]
    unions = [variants(field.annotation) for field in fields if not isinstance(field.default, Options)]
    return list(dict.fromkeys(found for union in unions if len(union) > 1 for found in union))


def _as_in_toml(part: Any) -> Any:
    if isinstance(part, list):
        return [_as_in_toml(p) for p in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "null":
        return {"const": "none"}
    found = {}
    for name, below in part.items():
        if name == "discriminator" or (name == "default" and below is None):
            continue  # null has no word in TOML: leaving the option out means it
        # A table without its kind is of the default one, or the preset's; several kinds may take it then.
        found["anyOf" if name == "oneOf" else name] = _as_in_toml(below)
    return found
