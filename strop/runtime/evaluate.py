"""`strop eval` as a function: score a model on held-out prompts, without training."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from strop import interrupts
from strop.config import TrainConfig
from strop.observe.console import Console, QuietConsole
from strop.rewards import make_scorer
from strop.runtime.cluster.connection import check_has_room
from strop.runtime.engine_kinds import check_engine
from strop.runtime.evaluation import Evaluation, answer_all
from strop.runtime.models import check_stop_token_ids, load_model, set_threads
from strop.runtime.run_folder import RunFolder
from strop.runtime.session import decoder, load_held_out, make_engine, make_eval_scorers
from strop.runtime.train import run_async
from strop.types import ConfigError, Engine


def evaluate(config: TrainConfig, *, console: Console | None = None) -> Evaluation:
    """Answer and score all sets of held-out prompts with the model of `model.path`.

    Raises:
        UserError: something a user can mend.
    """
    console = console or QuietConsole()
    if not config.eval.all_sets:
        raise ConfigError(
            "eval.data must be given to evaluate. Add a table [eval.data] with kind and path, or tables [eval.sets.NAME.data]."
        )
    model = Path(config.model.path)
    folder = RunFolder(model.parent)
    if model in (folder.model, folder.best) and folder.config.exists():
        folder.check_model(model)
    check_has_room(config)
    of_run = make_scorer(config.reward)
    with ExitStack() as everything:
        everything.callback(of_run.close)
        scorers = make_eval_scorers(config, of_run)
        for scorer in scorers.values():
            everything.callback(scorer.close)
        check_engine(config.engine)
        set_threads(config.trainer.num_threads)
        loaded = load_model(config.model)
        check_stop_token_ids(loaded, config.rollout.stop_token_ids)
        sets = load_held_out(config, loaded, console, scorers)
        interrupts.check()
        engine = make_engine(config, loaded, console)
        work = answer_all(engine, sets, config, step=0, decode=decoder(loaded), console=console)
        return run_async(_interruptible(work, engine))


async def _interruptible(work: Coroutine[Any, Any, Evaluation], engine: Engine) -> Evaluation:
    """Ctrl-C and SIGTERM end it at once: there is nothing to save."""
    with interrupts.cancelling():
        try:
            return await work
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            await engine.close()
