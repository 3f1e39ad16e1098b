"""The option tree as data: which options there are, under which paths, and which name a mistyped one is nearest to."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple, get_args, get_origin

from pydantic.fields import FieldInfo

from strop.config.base import Options
from strop.config.foreign_names import OPTION_OF

NAME = "NAME"  # stands for the name that a user gives a table, as in eval.sets.NAME.top_k


class Leaf(NamedTuple):
    """One option: its dotted path, the class it belongs to, and its field."""

    path: str
    owner: type[Options]
    field: FieldInfo

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def kind(self) -> str | None:
        """The variant that its class is, where `kind` tells variants apart (a Literal of one word)."""
        field = self.owner.model_fields.get("kind")
        return field.default if field is not None and len(get_args(field.annotation)) == 1 else None


def variants(annotation: Any) -> list[type[Options]]:
    """The options classes that an annotation admits: none for a leaf, several for a union on `kind`."""
    if isinstance(annotation, type) and issubclass(annotation, Options):
        return [annotation]
    return [found for part in get_args(annotation) for found in variants(part)]


def is_named(annotation: Any) -> bool:
    """True for tables under names that the user chooses: dict[str, SomeOptions]."""
    return get_origin(annotation) is dict and bool(variants(annotation))


@cache
def tables_of(owner: type[Options]) -> dict[str, list[type[Options]]]:
    """Name to the options classes that may stand there, for the tables directly below a class."""
    fields = owner.model_fields.items()
    return {name: below for name, field in fields if (below := variants(field.annotation))}


@cache
def leaves(root: type[Options]) -> tuple[Leaf, ...]:
    """Every option of a tree, variants of a union one after the other under the same path."""
    return tuple(_walk(root, ""))


def _walk(owner: type[Options], prefix: str) -> Iterator[Leaf]:
    for name, field in owner.model_fields.items():
        if name not in tables_of(owner):
            yield Leaf(prefix + name, owner, field)
        for variant in tables_of(owner).get(name, ()):
            yield from _walk(variant, f"{prefix}{name}.{NAME}." if is_named(field.annotation) else f"{prefix}{name}.")


def paths_named(root: type[Options], name: str) -> list[str]:
    """All paths that end in this leaf name, but those in tables that a user names: they are always written whole."""
    found = dict.fromkeys(leaf.path for leaf in leaves(root) if leaf.name == name)
    return [path for path in found if f".{NAME}." not in path]


@cache
def _named_tables(root: type[Options]) -> tuple[str, ...]:
    """Paths below which tables have names of the user's."""
    return tuple(dict.fromkeys(path.partition(f".{NAME}.")[0] for path in paths(root) if f".{NAME}." in path))


def named(root: type[Options], path: str) -> str | None:
    """The table with a name of the user's that a path is or lies in: eval.sets.aime of eval.sets.aime.top_k."""
    for table in _named_tables(root):
        name = path.removeprefix(f"{table}.").partition(".")[0]
        if path.startswith(f"{table}.") and name:
            return f"{table}.{name}"
    return None


def general(root: type[Options], path: str) -> str:
    """A path as it is in the tree, with the names of the user's replaced: eval.sets.NAME.top_k."""
    table = named(root, path)
    return path if table is None else f"{table.rpartition('.')[0]}.{NAME}{path.removeprefix(table)}"


@cache
def paths(root: type[Options]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(leaf.path for leaf in leaves(root)))


@cache
def tables(root: type[Options]) -> tuple[str, ...]:
    """Paths of all tables."""
    names = {path.rpartition(".")[0] for path in paths(root)} - {""}
    return tuple(sorted({part for name in names for part in _prefixes(name)}))


@cache
def union_tables(root: type[Options]) -> set[str]:
    """Paths of the tables that come in variants, told apart by `kind`."""
    return {leaf.path.rpartition(".")[0] for leaf in leaves(root) if leaf.name == "kind" and leaf.kind is not None}


def is_union(root: type[Options], table: str) -> bool:
    """True for the path of a table that comes in variants."""
    return general(root, table) in union_tables(root)


def kinds(root: type[Options], table: str) -> list[str]:
    """The kinds that a table may be of, in the order of its union."""
    path = general(root, f"{table}.kind")
    return list(dict.fromkeys(str(leaf.kind) for leaf in leaves(root) if leaf.path == path))


@cache
def free_tables(root: type[Options]) -> tuple[str, ...]:
    """Paths of the options that are tables with any entries, such as data.options."""
    return tuple(leaf.path for leaf in leaves(root) if get_origin(leaf.field.annotation) is dict)


def _prefixes(path: str) -> Iterator[str]:
    parts = path.split(".")
    yield from (".".join(parts[: i + 1]) for i in range(len(parts)))


def explain_unknown(root: type[Options], path: str, kind: str | None = None) -> str:
    """What to say of an option that does not exist: where its name is valid, or the nearest that is. `kind`: of the table
    that it was written in, where tables like that come in several."""
    table, told = named(root, path), _explain(root, general(root, path), kind)
    return told if table is None else told.replace(f"{table.rpartition('.')[0]}.{NAME}", table)


def _explain(root: type[Options], path: str, kind: str | None) -> str:
    fixed = path.replace("-", "_")
    if fixed != path and (fixed in paths(root) or fixed in tables(root)):
        return f"Write it with underscores: {fixed}."
    name = fixed.rpartition(".")[2]
    owners = [leaf for leaf in leaves(root) if leaf.name == name and _may_be_meant(leaf.path, path)]
    same_place = [leaf for leaf in owners if leaf.path == fixed]
    if same_place:
        kinds = " or ".join(f'kind = "{leaf.kind}"' for leaf in same_place)
        table = fixed.removesuffix(name)
        own = [leaf.owner for leaf in leaves(root) if leaf.kind == kind and leaf.path.startswith(table)]
        reason = next((f"; {owner.why_not[name]}" for owner in own if name in owner.why_not), "")
        return f"{name} belongs to {kinds}{reason}."
    if owners:
        return f"{name} is valid as {' or '.join(dict.fromkeys(leaf.path for leaf in owners))}."
    near = _nearest(root, fixed)
    lower = fixed.lower()
    if lower != fixed and (lower in paths(root) or paths_named(root, lower)):
        near = [lower] if lower in paths(root) else paths_named(root, lower)
    elif OPTION_OF.get(name.lower()) in paths(root):
        return f"The option for it here is {OPTION_OF[name.lower()]}."
    elif name.startswith("no_") and paths_named(root, name.removeprefix("no_")):
        return f"Write {' or '.join(paths_named(root, name.removeprefix('no_')))} with the value false."
    if near:
        return f"The nearest option is {' or '.join(near)}."
    return "strop explain CONFIG (with --sft for one of strop sft) lists all options."


def _nearest(root: type[Options], path: str) -> list[str]:
    """The options or tables that a path was likeliest meant for; of one last name, all that have it."""
    table, _, name = path.rpartition(".")
    everything = [p for p in dict.fromkeys([*paths(root), *tables(root)]) if _may_be_meant(p, path)]
    siblings = [p for p in everything if table and p.rpartition(".")[0] == table]
    near = difflib.get_close_matches(path, siblings, n=1, cutoff=0.6)
    near = near or [p for p in everything if name in _with_underscores(p)]
    if near:
        return near
    names = dict.fromkeys(p.rpartition(".")[2] for p in everything)
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return [p for p in everything if p.rpartition(".")[2] in matches]


def _may_be_meant(path: str, written: str) -> bool:
    """Options of tables that a user names are meant only by who writes such a name."""
    return NAME not in path.split(".") or NAME in written.split(".")


def _with_underscores(path: str) -> list[str]:
    """How algorithm.kl.coef is written in other frameworks: algorithm_kl_coef, kl_coef, coef."""
    parts = path.split(".")
    return ["_".join(parts[i:]) for i in range(len(parts))]


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of everything in nested tables."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def walk(options: Options, prefix: str = "") -> Iterator[tuple[str, Options]]:
    """The options objects of a config with their paths ("" for the root), outermost first."""
    yield prefix, options
    for name, table in tables_in(options):
        yield from walk(table, f"{prefix}.{name}" if prefix else name)


def tables_in(options: Options) -> Iterator[tuple[str, Options]]:
    """The tables directly below one of a config; those with names of the user's as sets.aime."""
    for name in tables_of(type(options)):
        value = getattr(options, name)
        if isinstance(value, Options):
            yield name, value
        elif isinstance(value, dict):
            yield from ((f"{name}.{own}", table) for own, table in value.items())


def options_in(options: Options) -> Iterator[tuple[str, Any]]:
    """The options of one table of a config, without the tables below it."""
    below = tables_of(type(options))
    for name, value in options:
        if name not in below or value is None:
            yield name, value


def _set_options(options: Options) -> Iterator[tuple[str, Options, str]]:
    """Path, table and name of every option that this config has."""
    for prefix, table in walk(options):
        for name, _ in options_in(table):
            yield f"{prefix}.{name}" if prefix else name, table, name


def values(options: Options) -> dict[str, Any]:
    """Path to value, for every option that this config has."""
    return {path: getattr(table, name) for path, table, name in _set_options(options)}


def defaults(options: Options) -> dict[str, Any]:
    """Path to default, for every option that this config has."""
    return {
        path: type(table).model_fields[name].get_default(call_default_factory=True)
        for path, table, name in _set_options(options)
    }


def leaf_of(options: Options, path: str) -> Leaf:
    """An option of this config as it is in the tree, of the variant that the config has."""
    table, _, name = path.rpartition(".")
    owner = type(dict(walk(options))[table])
    return Leaf(path, owner, owner.model_fields[name])


def described(options: Options, path: str) -> str:
    """What an option of this config means."""
    return leaf_of(options, path).field.description or "Which variant of this table."
