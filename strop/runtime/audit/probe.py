"""One small run of a config, and all that it leaves behind, as numbers that can be compared."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from strop import products
from strop.algorithms import TrainableTokens
from strop.config import RewardOptions, SFTConfig, TrainConfig
from strop.observe.console import QuietConsole
from strop.observe.metrics_file import read_metrics
from strop.rewards import Scorer, make_scorer
from strop.rollout.seeds import mix_seed
from strop.runtime.audit import engine_servers
from strop.runtime.audit.here import why_no_kind_here
from strop.runtime.audit.outcome import Outcome
from strop.runtime.audit.stand_in import Spoil
from strop.runtime.session import Session
from strop.runtime.sft import sft
from strop.runtime.train import opened, run
from strop.trainers import merged
from strop.trainers.megatron import matrix_modules
from strop.types import Completion, Engine, GenerateRequest, GuardError, Prompt, Rollout, StepMetrics, StropError

_PORT = re.compile(r"(?<=127\.0\.0\.1):\d+")  # another one in each run
_ANSWERS = (("7", "7"), (" 7\n", "7"), ("7.4", "7"), ("x = 7", "7"), ("3", "7"), ("", "7"), (r"\boxed{7}", "7"))

# Programs, with what they are to do, that take one thing more than others do.
_FORKS = "import os, time\nif os.fork():\n    os.wait()\nelse:\n    time.sleep(0.2)"
_PROGRAMS = (
    ("x = 3", '["assert x == 3", "assert x == 4"]'),
    ("bytearray(128 << 20)", "7"),
    ("open('file', 'wb').write(bytes(3 << 20))", "7"),
    (_FORKS, "7"),
    ("import os\nis_apart = os.getpid() == 1 or os.getuid() > 60000", "assert is_apart"),
)
_BROKEN_ENTRY = {"dataset": "chain_sum", "options": {}, "entry": {}}  # a dataset's own scorer fails on it


def probe(
    config: TrainConfig,
    *,
    spoil: Callable[[Session], None] = lambda session: None,
    fault: Callable[[], Spoil] | None = None,
) -> Outcome:
    """Run a config, whose folder is thrown away afterwards, with a sampler whose log-probabilities are a little off, as another
    engine's would be. An error that the run ends with is part of the outcome. `spoil` may break something of the session
    before it begins, `fault` may come between the engine and its servers."""
    before, kind = torch.zeros(0), ""
    engine_servers.begin(fault)

    def work() -> None:
        nonlocal before, kind
        with opened(config, QuietConsole()) as session:
            model = session.loaded.model
            before = _flat(dict(merged(model).named_parameters()))
            kind = f"{type(model).__name__} {model.dtype} {model.device}"
            if session.engine is not None:
                session.engine = _OtherEngine(session.engine)
            spoil(session)
            run(session)

    found = _watched(work)
    others = {**found.others, "model": kind, "servers": engine_servers.seen()}
    return _read(config.folder, before, replace(found, others=others))


def probe_lost_server(config: TrainConfig) -> Outcome:
    """The same, with an engine's server that is lost on the way."""
    return probe(config, fault=engine_servers.lost_once)


def probe_absent_server(config: TrainConfig) -> Outcome:
    """The same, with one that nobody reaches."""
    return probe(config, fault=engine_servers.absent)


def probe_hanging_server(config: TrainConfig) -> Outcome:
    """The same, with one that never answers."""
    return probe(config, fault=engine_servers.hanging)


def probe_mixed_versions(config: TrainConfig) -> Outcome:
    """The same, with newer weights from the middle of each response on."""

    def spoil(session: Session) -> None:
        if session.engine is not None:
            session.engine = _UpdatedEngine(session.engine)

    return probe(config, spoil=spoil)


def probe_sft(config: SFTConfig) -> Outcome:
    """The same for a config of strop sft, through the command's own function."""
    found = _watched(lambda: sft(config))
    weights, settings = Path(config.model.path, "model.safetensors"), config.folder / "model/config.json"
    before = _flat(load_file(weights)) if weights.exists() else torch.zeros(0)
    kind = (
        [json.loads(settings.read_text()).get(name) for name in ("architectures", "dtype")] if settings.exists() else []
    )
    return _read(config.folder, before, replace(found, others={**found.others, "model": kind}))


def _watched(work: Callable[[], object]) -> Outcome:
    """What can be seen of a run from outside of its folder: its threads, its forward passes, how many weights its optimizers
    move, and how it ended."""
    shapes, moved, threads = Counter[tuple[int, ...]](), set[int](), torch.get_num_threads()
    error, is_guard = "", False
    with _no_logging(), _counting_forward_passes(shapes), _counting_what_moves(moved):
        try:
            work()
        except StropError as stopped:
            error, is_guard = _PORT.sub("", str(stopped)), isinstance(stopped, GuardError)
    used = torch.get_num_threads()
    torch.set_num_threads(threads)
    others = {"threads": used, "forward passes": shapes, "optimizer": sorted(moved)}
    return Outcome(others=others, error=error, is_guard=is_guard)


def probe_broken_losses(config: TrainConfig) -> Outcome:
    """The same, with losses that are not finite from the second step on."""
    return probe(config, spoil=lambda session: _spoil(session, since=1, losses=float("nan")))


def probe_loss_jumps(config: TrainConfig) -> Outcome:
    """The same, with losses from the third step on that are a million times what they are."""
    return probe(config, spoil=lambda session: _spoil(session, since=2, losses=1e6))


def probe_kl_jumps(config: TrainConfig) -> Outcome:
    """The same, with KLs from the third step on that are a million times what they are."""
    return probe(config, spoil=lambda session: _spoil(session, since=2, kls=1e6))


def probe_early_jumps(config: TrainConfig) -> Outcome:
    """The same, with both from the second step on."""
    return probe(config, spoil=lambda session: _spoil(session, since=1, losses=1e6, kls=1e6))


def _spoil(session: Session, *, since: int, losses: float = 1.0, kls: float = 1.0) -> None:
    """Multiply losses, and KLs as the guards see them, once so many steps are made."""
    whole, objective = session.objective.loss, session.objective

    def loss(tokens: TrainableTokens) -> tuple[Tensor, StepMetrics]:
        found, metrics = whole(tokens)
        if session.step < since:
            return found, metrics
        spoilt = {name: replace(m, total=m.total * kls) for name, m in metrics.items() if name.startswith("kl_")}
        return found * losses, metrics | spoilt

    objective.loss = loss  # type: ignore[method-assign]


def probe_scorer(config: TrainConfig) -> Outcome:
    """Score answers that are made up, each by itself: right ones, wrong ones, and such as may make a scorer fail. Those of
    sets of held-out prompts score them too."""
    rewards = [config.reward, *(own.reward for own in config.eval.sets.values() if own.reward is not None)]
    try:
        return Outcome(others={"scores": [_scores(reward) for reward in rewards]})
    except StropError as error:
        return Outcome(error=str(error))


def _scores(reward: RewardOptions) -> list[Any]:
    scores: list[Any] = []
    scorer = make_scorer(reward)
    for sample, (text, label) in enumerate(_PROGRAMS if reward.kind == "code" else _ANSWERS):
        prompt = Prompt(row=sample, tokens=(2,), text="", label=label, metadata=_BROKEN_ENTRY)
        rollout = Rollout(prompt, 0, sample, (2, 3), (False, True), (0.0, -1.0), (-1, 0), "stop", text=text)
        scores.append(_scored(scorer, rollout))
    return scores


def _scored(scorer: Scorer, rollout: Rollout) -> Any:
    with _no_logging():
        try:
            (scored,) = scorer([rollout]).rollouts
        except StropError as error:
            return str(error)
    return scored.reward, scored.excluded


@contextmanager
def _no_logging() -> Iterator[None]:
    """Nothing is said of errors that are meant to happen."""
    logger = logging.getLogger("strop")
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


def _read(folder: Path, before: Tensor, seen: Outcome) -> Outcome:
    """What was seen, with what lies in the run folder, which is thrown away."""
    lines = read_metrics(folder / "metrics.jsonl")
    rows = [{k: v for k, v in row.items() if not _is_time(k)} for row in lines]
    steps = [row for row in rows if row["step"] > 0]  # the others are evaluations before the first one
    model = folder / "model/model.safetensors"
    weights = _flat(load_file(model)) if model.exists() else torch.zeros(0)
    rollouts = {path.name: _lines(path) for path in sorted((folder / "rollouts").glob("*.jsonl"))}
    others = {
        **seen.others,
        "guards": [{k: v for k, v in row.items() if k.startswith("guard/")} for row in rows],
        "refused": {path.name: _lines(path) for path in sorted((folder / "guards").glob("*.jsonl"))},
        "samples": {name: rows for name, rows in rollouts.items() if name.startswith("step")},
        "evaluation": {name: rows for name, rows in rollouts.items() if name.startswith("eval")},
        "schedule": [(row.get("lr"), row.get("skipped_steps")) for row in steps],
        "best step": best.read_text() if (best := folder / "best/best.json").exists() else "",
        "validation": [{k: v for k, v in row.items() if k.startswith("validation/")} for row in rows],
        "metrics": [_but(row, "loss", "lr") for row in rows],
        "files": sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()),
        "folder": folder.name,
    }
    shutil.rmtree(folder, ignore_errors=True)
    losses = tuple(row.get("loss", 0.0) for row in steps)
    return replace(
        seen, losses=losses, weights=weights - before if weights.shape == before.shape else weights, others=others
    )


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _but(row: dict[str, float], *names: str) -> dict[str, float]:
    return {k: v for k, v in row.items() if k not in names}


def _is_time(name: str) -> bool:
    return name.startswith("seconds/") or name == "tokens_per_second"


def _flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].detach().float().flatten() for name in sorted(tensors)])


@contextmanager
def _counting_forward_passes(shapes: Counter[tuple[int, ...]]) -> Iterator[None]:
    """Count what shapes go through embeddings and linear layers: how sampling and training cut their work, and what of it is
    done twice. A hook of all modules would count too, and slow every one of them down."""

    def counted(forward: Callable[..., Any]) -> Callable[..., Any]:
        def see(module: torch.nn.Module, given: Tensor, *args: Any, **more: Any) -> Any:
            shapes[tuple(given.shape)] += 1
            return forward(module, given, *args, **more)

        return see

    before = {kind: kind.forward for kind in _modules_with_matrices()}
    for kind, forward in before.items():
        kind.forward = counted(forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, forward in before.items():
            kind.forward = forward  # type: ignore[method-assign]


def _modules_with_matrices() -> list[type[torch.nn.Module]]:
    found = [torch.nn.Embedding, torch.nn.Linear, products.Linear]
    return found if why_no_kind_here("trainer", "megatron") else [*found, *matrix_modules()]


@contextmanager
def _counting_what_moves(numbers: set[int]) -> Iterator[None]:
    """How many weights, or masters of weights, optimizers of this process move in a step."""

    def see(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        numbers.add(sum(p.numel() for group in optimizer.param_groups for p in group["params"]))

    handle = register_optimizer_step_pre_hook(see)
    try:
        yield
    finally:
        handle.remove()


class _Altered:
    """The engine of the run, with samples that are altered."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        found = await self._engine.generate(request)
        return [self._altered(c, seed) for c, seed in zip(found, request.seeds, strict=True)]

    def _altered(self, completion: Completion, seed: int) -> Completion:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class _OtherEngine(_Altered):
    """Log-probabilities are off by up to half a nat: corrections have something to correct."""

    def _altered(self, completion: Completion, seed: int) -> Completion:
        return replace(completion, logprobs=_disturbed(completion.logprobs, seed))


class _UpdatedEngine(_Altered):
    """The second half of each response is of the next version of the weights."""

    def _altered(self, completion: Completion, seed: int) -> Completion:
        half = len(completion.tokens) // 2
        versions = (v + (place >= half) for place, v in enumerate(completion.policy_versions))
        return replace(completion, policy_versions=tuple(versions))


def _disturbed(logprobs: tuple[float, ...], seed: int) -> tuple[float, ...]:
    return tuple(x + mix_seed(seed, place) / 2**63 - 0.5 for place, x in enumerate(logprobs))
