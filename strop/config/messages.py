"""Validation errors in the words of a user: the option's dotted path, the rule, the value, and what to do."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from strop.config import tree
from strop.config.base import Options
from strop.config.lines import Sources

_TYPES = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "text",
}


def describe(root: type[Options], error: ValidationError, sources: Sources) -> list[str]:
    """One line for each problem."""
    lines = []
    for problem in error.errors(include_url=False):
        path = path_of(root, problem["loc"])
        lines.append(_sentence(root, path, dict(problem)) + sources.note(path))
    return lines


def path_of(root: type[Options], loc: tuple[int | str, ...]) -> str:
    """The dotted path of an error: pydantic's location without the tags of unions."""
    classes, parts = [root], []
    names_a_table = False
    for part in loc:
        if names_a_table:  # by a name of the user's: the classes stay those of the field
            parts.append(str(part))
            names_a_table = False
            continue
        kinds = [c for c in classes if "kind" in c.model_fields and c.model_fields["kind"].default == part]
        if kinds and len(classes) > 1:
            classes = kinds
            continue
        parts.append(str(part))
        fields = [c.model_fields[part] for c in classes if isinstance(part, str) and part in c.model_fields]
        classes = [v for field in fields for v in tree.variants(field.annotation)]
        names_a_table = any(tree.is_named(field.annotation) for field in fields)
    return ".".join(parts)


def _sentence(root: type[Options], path: str, problem: dict[str, Any]) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        tag = str(problem["loc"][-2]) if len(problem["loc"]) > 1 else None
        return f"{path} is not an option here. {tree.explain_unknown(root, path, tag)}"
    if kind == "missing":
        return f"{path} must be given.{_hint(root, path)}"
    if kind == "union_tag_not_found":
        return f"{path}.kind must be given. It may be {_kinds(root, path)}."
    if kind == "union_tag_invalid":
        return f"{path}.kind must be one of {_kinds(root, path)}, got {context['tag']!r}."
    rule = problem["msg"].removeprefix("Input should be ").replace("'", "")
    if kind == "literal_error":
        rule = "one of " + context["expected"].replace("'", "").replace(" or ", ", ")
    if kind in ("tuple_type", "list_type"):
        rule = "a list such as [1, 2]"
    if kind in ("bool_type", "bool_parsing"):
        rule = "true or false"
    if kind in _TYPES:
        rule = _TYPES[kind]
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        rule = "a table"
    return f"{path} must be {rule}, got {problem['input']!r}."


def _kinds(root: type[Options], path: str) -> str:
    return ", ".join(tree.kinds(root, path))


def _hint(root: type[Options], path: str) -> str:
    general = tree.general(root, path)
    descriptions = [leaf.field.description for leaf in tree.leaves(root) if leaf.path == general]
    if descriptions and descriptions[0]:
        return f" {descriptions[0]}"
    kinds = " or ".join(f'"{kind}"' for kind in tree.kinds(root, path))
    return (
        f" Add a table [{path}]" + (f" with kind = {kinds}." if kinds else ".") if general in tree.tables(root) else ""
    )
