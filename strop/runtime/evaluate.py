"""`strop eval` as a function: score a model on held-out prompts, without training."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from strop import interrupts
from strop.config import TrainConfig
from strop.observe.console import Console, QuietConsole
from strop.rewards import make_scorer
from strop.runtime.evaluation import Evaluation, answer_all
from strop.runtime.models import check_stop_token_ids, load_model, set_threads
from strop.runtime.run_folder import RunFolder
from strop.runtime.session import decoder, load_held_out, make_engine
from strop.runtime.train import run_async
from strop.types import ConfigError


def evaluate(config: TrainConfig, *, console: Console | None = None) -> Evaluation:
    """Answer and score the prompts of `eval.data` with the model of `model.path`.

    Raises:
        UserError: something a user can mend.
    """
    console = console or QuietConsole()
    if config.eval.data is None:
        raise ConfigError("eval.data must be given to evaluate. Add a table [eval.data] with kind and path.")
    model = Path(config.model.path)
    if model.name == "model" and RunFolder(model.parent).config.exists():
        RunFolder(model.parent).check_model()
    scorer = make_scorer(config.reward)
    set_threads(config.trainer.num_threads)
    loaded = load_model(config.model)
    check_stop_token_ids(loaded, config.rollout.stop_token_ids)
    prompts = load_held_out(config, loaded, console)
    interrupts.check()
    work = answer_all(
        make_engine(config, loaded),
        prompts,
        scorer,
        config.eval,
        max_response_tokens=config.rollout.max_response_tokens,
        stop_token_ids=config.rollout.stop_token_ids,
        seed=config.seed,
        step=0,
        decode=decoder(loaded),
        console=console,
    )
    return run_async(_interruptible(work))


async def _interruptible(work: Coroutine[Any, Any, Evaluation]) -> Evaluation:
    """Ctrl-C and SIGTERM end it at once: there is nothing to save."""
    with interrupts.cancelling():
        try:
            return await work
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
