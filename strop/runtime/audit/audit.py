"""Every option of a config is turned, one at a time, and something must move; what moves nothing is dead."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from strop.config import TrainConfig, tree
from strop.runtime.audit.engine_servers import standing
from strop.runtime.audit.finding import Finding
from strop.runtime.audit.here import why_no_kind_here
from strop.runtime.audit.runs import Config, Runs, is_meant
from strop.runtime.audit.teacher_server import TeacherModel, serving
from strop.runtime.audit.workshop import TEACHERS, write_workshop
from strop.types import UserError


def audit(config: Config, *, every_kind: bool = False, only: str = "") -> Iterator[Finding]:
    """Findings for every option of a config, one after the other; with `every_kind` for those of all other kinds of its
    tables too, with `only` for those of one table.

    The runs have the config's [algorithm], and everything else of it, with these exceptions: model, data and scores are
    made up, batches, prompts and responses are small, what counts steps is shortened, the learning rate is so high
    that ratios leave 1, and the sampler's log-probabilities are off a little.

    Raises:
        UserError: `only` names nothing that would be looked at, or the small run of the config itself fails.
    """
    only = check_only(config, only, every_kind)
    with tempfile.TemporaryDirectory(prefix="strop-audit-") as folder:
        has_stages = not why_no_kind_here("trainer", "megatron")  # which take a layer each
        write_workshop(Path(folder), num_layers=2 if has_stages else 1)
        with _teacher_server(config, Path(folder)) as server, _engine_servers(config, Path(folder)):
            runs = Runs(config, Path(folder), server)
            for path in tree.values(config):
                if is_meant(path, only):
                    yield runs.examine(path)
            for table, kind in _other_kinds(config) if every_kind else ():
                general = tree.general(type(config), f"{table}.")
                leaves = [
                    leaf for leaf in tree.leaves(type(config)) if leaf.path.startswith(general) and leaf.kind == kind
                ]
                if any(is_meant(f"{table}.{leaf.name}", only) for leaf in leaves):
                    yield from runs.examine_kind(table, kind, only)


def _teacher_server(config: Config, folder: Path) -> AbstractContextManager[str]:
    """What stands for the servers of a config's teachers; no server where it has none."""
    if not isinstance(config, TrainConfig) or not config.distillation.addresses:
        return nullcontext("")
    return serving(TeacherModel(folder / TEACHERS[0]))


def _engine_servers(config: Config, folder: Path) -> AbstractContextManager[None]:
    """What stands for the servers of an engine; nothing where a config has no engine."""
    return standing(folder) if isinstance(config, TrainConfig) else nullcontext()


def check_only(config: Config, only: str, every_kind: bool) -> str:
    """The table or option that --only means, without a dot at its end.

    Raises:
        UserError: there is none of that name, or none that this audit looks at.
    """
    only, root = only.rstrip("."), type(config)
    if only == "" or any(is_meant(path, only) for path in tree.values(config)):
        return only
    if not any(is_meant(path, only) for path in tree.paths(root)):
        hint = tree.explain_unknown(root, only)
        raise UserError(f"--only must name a table or an option of this config, got {only!r}. {hint}")
    if not every_kind:
        hint = tree.explain_unknown(root, only)
        raise UserError(f"--only {only} is no option of this config's kinds. {hint} Add --all to look at every kind.")
    return only


def _other_kinds(config: Config) -> Iterator[tuple[str, str]]:
    now, root = tree.values(config), type(config)
    for table in sorted(path.removesuffix(".kind") for path in now if path.endswith(".kind")):
        for kind in tree.kinds(root, table) if tree.is_union(root, table) else ():
            if kind != now[f"{table}.kind"]:
                yield table, kind
