"""What `strop eval TARGET` evaluates: a config, a run folder, a model in a run folder, or a model folder by itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.config.load import load_config, make_config, read_toml
from strop.config.overrides import nest
from strop.config.root import TrainConfig
from strop.types import ConfigError

_OF_A_RUN = ("model", "best")
_UNREAD = {"kind": "reasoning_gym", "name": "unread"}  # a config has training prompts; an evaluation does not read them


def load_eval_config(target: Path, overrides: Mapping[str, Any]) -> TrainConfig:
    """The config of an evaluation.

    Args:
        target: a TOML file; a run folder, of which model/ is taken; model/ or best/ of a run folder, whose config is
            taken; or any other folder of a model, for which the overrides say everything. There data.path is short for
            eval.data.path.
        overrides: option to value, as for `load_config`.

    Raises:
        ConfigError: with every problem found, one a line.
    """
    if (target / "config.toml").exists():
        return load_config(target / "config.toml", {"model.path": str(target / "model"), **overrides}, command="eval")
    of_run = _run_config(target)
    if of_run is not None and target.name == "best" and not target.is_dir():
        raise ConfigError(
            f"{target.parent} keeps no best model of its run: no evaluation of it is made yet, or eval.keep_best = false. "
            f"{target.parent / 'model'} is the model at the end."
        )
    if of_run is not None:
        return load_config(of_run, {"model.path": str(target), **overrides}, command="eval")
    if not target.is_dir():
        return load_config(target, overrides, command="eval")
    if not (target / "config.json").exists():
        raise ConfigError(
            f"{target} is no folder to evaluate: a run folder has a config.toml, a model's folder a config.json."
        )
    return _of_model(target, overrides)


def _run_config(model: Path) -> Path | None:
    """The config of the run of strop train that a model folder belongs to."""
    whole = model.resolve()
    config = whole.parent / "config.toml"
    if whole.name in _OF_A_RUN and config.exists() and "reward" in read_toml(config)[0]:  # strop sft has no [reward]
        return config
    return None


def _of_model(model: Path, overrides: Mapping[str, Any]) -> TrainConfig:
    given = {f"eval.{name}" if f"{name}.".startswith("data.") else name: value for name, value in overrides.items()}
    if len(given) < len(overrides):
        raise ConfigError("data.* means eval.data.* where a model is evaluated: give each of them once.")
    nested, _ = nest(TrainConfig, given, is_eval=True)
    values: dict[str, Any] = {"model": {"path": str(model)}, "data": _UNREAD}
    held_out = _table(_table(nested, "eval"), "data")
    sets = list(_table(_table(nested, "eval"), "sets").values())
    if not held_out and not sets:
        raise ConfigError(
            f"eval.data must be given: {model} is a model without a config. Add --data.path FILE, or name a config and "
            "--model.path."
        )
    if "path" in held_out and "kind" not in held_out:
        values["eval"] = {"data": {"kind": "parquet" if str(held_out["path"]).endswith(".parquet") else "jsonl"}}
    if "reward" not in nested:
        rewards = [_table(table, "reward") for table in sets if isinstance(table, dict)]
        if held_out or not all(rewards):
            raise ConfigError(
                "reward.kind must be given to score the answers. Add --reward.kind number, or another kind."
            )
        values["reward"] = rewards[0]  # a config has one; here each set has its own
    return make_config(TrainConfig, values, given, file=str(model), is_eval=True)


def _table(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = values.get(name, {})
    return table if isinstance(table, dict) else {}
