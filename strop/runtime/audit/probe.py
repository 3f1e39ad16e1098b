"""One small run of a config, and all that it leaves behind, as numbers that can be compared."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from strop.config import RewardOptions, TrainConfig
from strop.observe.console import QuietConsole
from strop.observe.metrics_file import read_metrics
from strop.rewards import Scorer, make_scorer
from strop.rollout.seeds import mix_seed
from strop.runtime.train import opened, run
from strop.types import Completion, Engine, GenerateRequest, Prompt, Rollout, StropError

_ANSWERS = (("7", "7"), (" 7\n", "7"), ("7.4", "7"), ("x = 7", "7"), ("3", "7"), ("", "7"), (r"\boxed{7}", "7"))

_BROKEN_ENTRY = {"dataset": "chain_sum", "options": {}, "entry": {}}  # a dataset's own scorer fails on it


@dataclass(frozen=True)
class Outcome:
    """What a run did, each part by a name that the table of an audit shows."""

    losses: tuple[float, ...] = ()
    weights: Tensor = field(default_factory=lambda: torch.zeros(0))
    others: dict[str, Any] = field(default_factory=dict)

    def changes_to(self, other: Outcome) -> dict[str, str]:
        """Part to how it changed, in words; nothing where the two runs did the same."""
        found = {}
        if self.losses != other.losses:
            found["loss"] = _largest_change(self.losses, other.losses)
        if self.weights.shape != other.weights.shape or not self.weights.equal(other.weights):
            found["update"] = _relative_change(self.weights, other.weights)
        names = [n for n in (*self.others, *other.others) if self.others.get(n) != other.others.get(n)]
        return found | {name: "differs" for name in dict.fromkeys(names)}


def _largest_change(one: tuple[float, ...], other: tuple[float, ...]) -> str:
    if len(one) != len(other):
        return f"{len(one)} -> {len(other)} steps"
    return f"{max(abs(a - b) for a, b in zip(one, other, strict=True)):.2g}"


def _relative_change(one: Tensor, other: Tensor) -> str:
    if one.shape != other.shape:
        return "no weights"
    return f"{float((one - other).norm() / one.norm().clamp_min(1e-30)):.2g}"


def probe(config: TrainConfig) -> Outcome:
    """Run a config, whose folder is thrown away afterwards, with a sampler whose log-probabilities are a little off, as another
    engine's would be. An error that the run ends with is part of the outcome."""
    console, shapes = _Listening(), Counter[tuple[int, ...]]()
    threads, error, before, kind = torch.get_num_threads(), "", None, ""
    try:
        with _counting_forward_passes(shapes), opened(config, console) as session:
            model = session.loaded.model
            before, kind = _flat(dict(model.named_parameters())), f"{type(model).__name__} {model.dtype}"
            session.engine = _OtherEngine(session.engine)
            run(session)
    except StropError as stopped:
        error = str(stopped)
    used = torch.get_num_threads()
    torch.set_num_threads(threads)
    others = {"error": error, "threads": used, "forward passes": shapes, "messages": console.lines, "model": kind}
    found = Outcome(others=others) if before is None else _read(config.folder, before, others)
    shutil.rmtree(config.folder, ignore_errors=True)
    return found


def probe_scorer(config: TrainConfig) -> Outcome:
    """Score answers that are made up, each by itself: right ones, wrong ones, and such as may make a scorer fail. Those of
    sets of held-out prompts score them too."""
    rewards = [config.reward, *(own.reward for own in config.eval.sets.values() if own.reward is not None)]
    return Outcome(others={"scores": [_scores(reward) for reward in rewards]})


def _scores(reward: RewardOptions) -> list[Any]:
    scores: list[Any] = []
    try:
        scorer = make_scorer(reward)
        for sample, (text, label) in enumerate(_ANSWERS):
            prompt = Prompt(row=sample, tokens=(2,), text="", label=label, metadata=_BROKEN_ENTRY)
            rollout = Rollout(prompt, 0, sample, (2, 3), (False, True), (0.0, -1.0), (-1, 0), "stop", text=text)
            scores.append(_scored(scorer, rollout))
    except StropError as error:
        scores.append(str(error))
    return scores


def _scored(scorer: Scorer, rollout: Rollout) -> Any:
    logger = logging.getLogger("strop")
    was, logger.disabled = logger.disabled, True  # of errors that are meant to happen
    try:
        (scored,) = scorer([rollout]).rollouts
    except StropError as error:
        return str(error)
    finally:
        logger.disabled = was
    return scored.reward, scored.excluded


def _read(folder: Path, before: Tensor, others: dict[str, Any]) -> Outcome:
    """What lies in a run folder."""
    lines = read_metrics(folder / "metrics.jsonl")
    rows = [{k: v for k, v in row.items() if not _is_time(k)} for row in lines]
    steps = [row for row in rows if row["step"] > 0]  # the others are evaluations before the first one
    model = folder / "model/model.safetensors"
    weights = _flat(load_file(model)) - before if model.exists() else torch.zeros(0)
    rollouts = {path.name: path.read_text() for path in sorted((folder / "rollouts").glob("*.jsonl"))}
    others = others | {
        "samples": {name: text for name, text in rollouts.items() if name.startswith("step")},
        "evaluation": {name: text for name, text in rollouts.items() if name.startswith("eval")},
        "schedule": [(row.get("lr"), row.get("skipped_steps")) for row in steps],
        "metrics": [_but(row, "loss", "lr") for row in rows],
        "files": sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()),
        "folder": folder.name,
        "best step": best.read_text() if (best := folder / "best/best.json").exists() else "",
    }
    return Outcome(tuple(row.get("loss", 0.0) for row in steps), weights, others)


def _but(row: dict[str, float], *names: str) -> str:
    return repr({k: v for k, v in row.items() if k not in names})  # as text, in which nan equals nan


def _is_time(name: str) -> bool:
    return name.startswith("seconds/") or name == "tokens_per_second"


def _flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].detach().float().flatten() for name in sorted(tensors)])


@contextmanager
def _counting_forward_passes(shapes: Counter[tuple[int, ...]]) -> Iterator[None]:
    """Count what shapes of token ids go through an embedding: how sampling and training cut their work."""

    def see(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        if isinstance(module, torch.nn.Embedding) and given:
            shapes[tuple(given[0].shape)] += 1

    handle = torch.nn.modules.module.register_module_forward_pre_hook(see)
    try:
        yield
    finally:
        handle.remove()


class _Listening(QuietConsole):
    """Keeps warnings: an option may do no more than speak."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def warn(self, text: str) -> None:
        self.lines.append(text)


class _OtherEngine:
    """The engine of the run, with log-probabilities off by up to half a nat: corrections have something to correct."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        found = await self._engine.generate(request)
        return [replace(c, logprobs=_disturbed(c.logprobs, s)) for c, s in zip(found, request.seeds, strict=True)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _disturbed(logprobs: tuple[float, ...], seed: int) -> tuple[float, ...]:
    return tuple(x + mix_seed(seed, place) / 2**63 - 0.5 for place, x in enumerate(logprobs))
