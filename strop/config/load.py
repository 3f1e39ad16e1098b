"""From a TOML file and overrides to a config: presets expanded, everything checked, the origin of each value kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from strop.config import tree
from strop.config.base import Options
from strop.config.lines import Sources
from strop.config.messages import describe
from strop.config.off_policy import AHEAD, default_correction, follows_from_ahead
from strop.config.overrides import nest
from strop.config.presets import PRESETS, preset_values
from strop.config.render import recorded_origins
from strop.config.repair import speaks_of, without_problems
from strop.config.root import RootConfig, SFTConfig, TrainConfig
from strop.config.toml_file import read_toml
from strop.types import ConfigError

Config = TypeVar("Config", bound=RootConfig)
LARGEST_FLOAT = 1e30  # well below float32's largest, so that sums and products of an option stay finite
_ACTS_IN_EVAL = (
    "seed",
    "model.",
    "reward.",
    "eval.",
    "engine.",
    "trainer.num_threads",
    "rollout.max_response_tokens",
    "rollout.stop_token_ids",
)
_ACTS_IN_TRAINING = ("eval.every_steps", "eval.at_start", "eval.best", "eval.keep_best")
Command = Literal["train", "sft", "eval"]
ROOTS: dict[Command, type[RootConfig]] = {"train": TrainConfig, "sft": SFTConfig, "eval": TrainConfig}


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None, *, command: Command = "train") -> Any:
    """Read a TOML file, lay overrides over it, check everything, and return the config.

    Args:
        path: the TOML file.
        overrides: option to value. An option is a dotted path (`algorithm.kl.coef`) or a last name (`eps_clip`) that
            occurs once outside [eval]; with command = "eval", one that [eval] has means the option there.
        command: "train" for a TrainConfig, "sft" for an SFTConfig, "eval" for a TrainConfig with the short names of
            `strop eval`.

    Raises:
        ConfigError: with every problem found, one a line.
    """
    path = Path(path)
    root, (file_values, text) = ROOTS[command], read_toml(path)
    try:
        return make_config(root, file_values, overrides or {}, file=str(path), text=text, is_eval=command == "eval")
    except ConfigError:
        telling = _option_of_the_other(root, file_values)
        if telling is not None:
            telling = f"{telling} is an option of it alone"
        elif "kind" not in _table(file_values, "data") and _is_whole(_other(root), file_values):
            telling = "it has all that one needs, and lacks what this command does"
        else:
            raise
        owner, advice = _OTHER_COMMAND[command]
        message = f"{path} is a config of {owner}: {telling}. {advice}"
        raise ConfigError(message) from None


def _as_recorded(origins: dict[str, str], file: str, recorded: dict[str, str]) -> dict[str, str]:
    """The origins of a run's own config: those that the run had, where nothing was laid over them since."""
    since = {path: origin for path, origin in origins.items() if origin != file}
    own = {path: origin for path, origin in recorded.items() if origin != "default" and path not in since}
    return own | since


def _other(root: type[RootConfig]) -> type[RootConfig]:
    return TrainConfig if root is SFTConfig else SFTConfig


def _is_whole(root: type[RootConfig], file_values: dict[str, Any]) -> bool:
    """Is this the config of another command, as it stands?"""
    try:
        make_config(root, file_values, {}, file="")
    except ConfigError:
        return False
    return True


# command -> the other command whose config it may have been given, and what to do then
_OTHER_COMMAND: dict[Command, tuple[str, str]] = {
    "train": ("strop sft", "Use strop sft, or strop explain --sft and strop audit --sft."),
    "eval": ("strop sft", "strop eval takes one of strop train; its --model.path may name what strop sft wrote."),
    "sft": ("strop train", "Use strop train, or strop explain and strop audit without --sft."),
}


def _option_of_the_other(root: type[RootConfig], file_values: dict[str, Any]) -> str | None:
    """An option of the file that only the other command has, if it has none that only this one has."""
    other = _other(root)
    given = [tree.general(TrainConfig, path) for path, _ in tree.flatten(file_values)]
    ours, theirs = set(tree.paths(root)), set(tree.paths(other))
    if any(path in ours - theirs for path in given):
        return None
    return next((path for path in given if path in theirs - ours), None)


def make_config(
    root: type[Config],
    file_values: dict[str, Any],
    overrides: Mapping[str, Any],
    *,
    file: str,
    text: str = "",
    is_eval: bool = False,
) -> Config:
    """The config that a file's values and overrides give, or one ConfigError with all problems; `text` is the file's, for
    lines and columns in messages, and for where a run's own config had its values from. With is_eval, short names are those
    of `strop eval`."""
    _refuse_endless_numbers(file_values, file)
    given, problems = nest(root, overrides, is_eval=is_eval)
    _refuse_endless_numbers(given, "command line")
    recorded = recorded_origins(text)
    file_values, nobodys = _of_own_config(file_values, recorded or {}, given)
    preset, layers = _layers(root, file_values, given, file)
    merged, origins = _merge(root, layers, nobodys)
    if root is TrainConfig:
        _correct(root, merged, origins, nobodys)
    sources = Sources(origins, file, text)
    try:
        config = root.model_validate(merged)
    except ValidationError as error:
        problems += describe(root, error, sources)
        config, taken_out = without_problems(root, merged, error)
        if config is not None:
            rules = _rules(config, _unset(preset, config), sources, is_eval=is_eval)
            problems += [rule for rule in rules if not speaks_of(rule, taken_out)]
        raise ConfigError("\n".join(dict.fromkeys(problems))) from None
    unset = _unset(preset, config)
    problems += _rules(config, unset, sources, is_eval=is_eval)
    if is_eval:
        problems += _idle_in_eval(config, unset, origins)
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    config.remember(origins if recorded is None else _as_recorded(origins, file, recorded), name=Path(file).stem)
    return config


def _of_own_config(
    file_values: dict[str, Any], recorded: dict[str, str], given: dict[str, Any]
) -> tuple[dict[str, Any], set[str]]:
    """Of a run's own config, which names every option, the values that stay, and the paths that nobody had set: defaults,
    and what the run's preset set, which leaves with it where the command line names another or none."""
    of_preset = {path for path, origin in recorded.items() if _is_of_preset(origin)}
    nobodys = of_preset | {path for path, origin in recorded.items() if origin == "default"}
    if "max_off_policy_steps" in _table(given, "rollout"):  # what had followed from it follows from the new value
        follows = {path for path, origin in recorded.items() if follows_from_ahead(path, origin)}
        tables = tuple(path.removesuffix("kind") for path in follows if path.endswith(".kind"))
        follows |= {path for path in nobodys if path.startswith(tables)} if tables else set()
        file_values = _without(file_values, follows)
    if "preset" not in _table(given, "algorithm"):
        return file_values, nobodys
    tables = tuple(path.removesuffix("kind") for path in of_preset if path.endswith(".kind"))
    return _without(file_values, of_preset | {path for path in nobodys if path.startswith(tables)}), nobodys


def _correct(root: type[Options], merged: dict[str, Any], origins: dict[str, str], nobodys: set[str]) -> None:
    """Lay what makes up for older policies over values that nobody has set."""
    somebodys = {path: origin for path, origin in origins.items() if path not in nobodys or origin == "command line"}
    for path, value in default_correction(merged, somebodys).items():
        table, name = merged, path
        while "." in name:
            part, _, name = name.partition(".")
            table = table.setdefault(part, {})
        if name == "kind":
            table.clear()  # of another kind, in a run's own config
        table[name] = value
        origins[path] = AHEAD


def _layers(
    root: type[Options], file_values: dict[str, Any], given: dict[str, Any], file: str
) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
    """What the preset sets, and all layers, the lowest first. What is written beside a preset wins over it: a preset of the
    file lies below the file, one of the command line below the command line and above the file."""
    layers = [(file, file_values), ("command line", given)]
    for place, (_, values) in reversed(list(enumerate(layers))) if root is TrainConfig else ():
        table = _table(values, "algorithm")
        if "preset" in table:
            name = table["preset"]
            preset = preset_values(name) if isinstance(name, str) and name in PRESETS else {}
            return preset, [*layers[:place], (f"preset {name}", preset), *layers[place:]]
    return {}, layers


def _table(values: dict[str, Any], name: str) -> dict[str, Any]:
    table = values.get(name, {})
    return table if isinstance(table, dict) else {}


def _without(values: dict[str, Any], gone: set[str], prefix: str = "") -> dict[str, Any]:
    return {
        name: _without(value, gone, f"{prefix}{name}.") if isinstance(value, dict) else value
        for name, value in values.items()
        if prefix + name not in gone
    }


def _is_of_preset(origin: str) -> bool:
    return origin.startswith("preset ")


def _merge(
    root: type[Options], layers: list[tuple[str, dict[str, Any]]], nobodys: set[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Lay the layers over one another. Where somebody changes the variant of a table, nothing stays that nobody has set: of
    a preset, or of what a run's own config says of itself (`nobodys`)."""
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, values in layers:
        _lay(root, merged, origins, values, origin, "", nobodys)
    _fill_kinds(root, merged)
    return merged, origins


def _lay(
    root: type[Options],
    target: dict[str, Any],
    origins: dict[str, str],
    values: dict[str, Any],
    origin: str,
    prefix: str,
    nobodys: set[str],
) -> None:
    changes_kind = target.get("kind", values.get("kind")) != values.get("kind", target.get("kind"))
    if changes_kind and tree.is_union(root, prefix.removesuffix(".")):
        for name in [n for n in target if _is_of_preset(origins.get(prefix + n, "")) or prefix + n in nobodys]:
            del target[name]
            origins.pop(prefix + name, None)  # a free table has one for each of its entries
    for name, value in values.items():
        if isinstance(value, dict):
            table = target.setdefault(name, {})
            if table in (None, "none"):  # an absent table that a later layer fills
                table = target[name] = {}
                origins.pop(prefix + name, None)
            if isinstance(table, dict):  # a plain value where a table belongs stays, to be refused
                _lay(root, table, origins, value, origin, f"{prefix}{name}.", nobodys)
        else:
            target[name] = value
            origins[prefix + name] = origin


def _fill_kinds(owner: type[Options], values: dict[str, Any]) -> None:
    """A table of a union that does not name its kind is of the default one."""
    for name, below in tree.tables_of(owner).items():
        field, table = owner.model_fields[name], values.get(name)
        if not isinstance(table, dict):
            continue
        for one in table.values() if tree.is_named(field.annotation) else [table]:
            if isinstance(one, dict):
                _fill_kind(below, field.default, one)


def _fill_kind(below: list[type[Options]], default: Any, table: dict[str, Any]) -> None:
    if len(below) > 1 and "kind" not in table and isinstance(default, Options):
        table["kind"] = default.kind  # type: ignore[attr-defined]
    for variant in below:
        if len(below) == 1 or variant.model_fields["kind"].default == table.get("kind"):
            _fill_kinds(variant, table)


def _unset(preset: dict[str, Any], config: Options) -> dict[str, Any]:
    """What each option would be if nobody had set it: by the preset or by default."""
    now = tree.values(config)
    left = tuple(f"{table}." for table in tree.union_tables(type(config)) if _changes_kind(preset, table, now))
    of_preset = {path: value for path, value in tree.flatten(preset) if not path.startswith(left)}
    return tree.defaults(config) | _default_kinds(config) | of_preset


def _default_kinds(config: Options) -> dict[str, str]:
    """The kind of each table that comes in variants, where nobody names it."""
    return {
        f"{prefix}.{name}.kind" if prefix else f"{name}.kind": vars(field.default)["kind"]
        for prefix, table in tree.walk(config)
        for name, field in type(table).model_fields.items()
        if isinstance(field.default, Options) and "kind" in type(field.default).model_fields
    }


def _changes_kind(preset: dict[str, Any], table: str, now: dict[str, Any]) -> bool:
    values: Any = preset
    for part in table.split("."):
        values = values.get(part, {})
    return "kind" in values and values["kind"] != now.get(f"{table}.kind")


def _refuse_endless_numbers(values: dict[str, Any], origin: str) -> None:
    """Python reads a hexadecimal number of any length and then refuses to print it, in the middle of a message."""
    for path, value in tree.flatten(values):
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and number.bit_length() > 64:
                raise ConfigError(
                    f"{origin}: {path} must be a number of at most 64 bits, got one of {number.bit_length()}."
                )


def _rules(config: Options, unset: dict[str, Any], sources: Sources, *, is_eval: bool) -> list[str]:
    """Broken rules, and options that were set to something of their own and cannot act; with is_eval no rules of options that
    only training reads."""
    now = tree.values(config)
    found = [
        f"{path} must be at most {LARGEST_FLOAT:g} in size, got {value:g}: the run computes in float32.{sources.note(path)}"
        for path, value in now.items()
        if isinstance(value, float) and LARGEST_FLOAT < abs(value) < math.inf
    ]
    for prefix, table in tree.walk(config):
        dot = f"{prefix}." if prefix else ""
        found += [
            f"{dot}{key} {message}{sources.note(dot + key)}"
            for key, message in table.problems()
            if not is_eval or _acts_in_eval(dot + key)
        ]
        for key, reason in table.idle():
            path = dot + key
            if path in now and now[path] != unset.get(path) and _is_somebodys(path, sources.origins):
                advice = "Leave it out, or change what keeps it from acting."
                found.append(f"{path} = {now[path]} {reason}. {advice}{sources.note(path)}")
    return found


def _is_somebodys(path: str, origins: dict[str, str]) -> bool:
    """Did somebody set it, or an entry of it where it is a free table? What a preset sets is nobody's."""
    of_it = (origin for set_here, origin in origins.items() if f"{set_here}.".startswith(f"{path}."))
    return any(not (_is_of_preset(origin) or follows_from_ahead(path, origin)) for origin in of_it)


def _idle_in_eval(config: Options, unset: dict[str, Any], origins: dict[str, str]) -> list[str]:
    """Flags of `strop eval` that only training reads. What the file says of training is no mistake."""
    return [
        f"{path} = {value} cannot act in strop eval, which does not train. Leave it out."
        for path, value in tree.values(config).items()
        if origins.get(path) == "command line" and value != unset.get(path)
        if not _acts_in_eval(path)
    ]


def _acts_in_eval(path: str) -> bool:
    return path.startswith(_ACTS_IN_EVAL) and path not in _ACTS_IN_TRAINING
