"""`strop eval` as a function: score a model on held-out prompts, without training."""

from __future__ import annotations

from strop.config import TrainConfig
from strop.data import load_prompts
from strop.observe.console import Console, QuietConsole
from strop.rewards import label_check, make_scorer
from strop.runtime.evaluation import Evaluation, answer_all
from strop.runtime.models import load_model, set_threads
from strop.runtime.session import decoder, make_engine
from strop.runtime.train import run_async
from strop.types import ConfigError


def evaluate(config: TrainConfig, *, console: Console | None = None) -> Evaluation:
    """Answer and score the prompts of `eval.data` with the model of `model.path`.

    Raises:
        UserError: something a user can mend.
    """
    if config.eval.data is None:
        raise ConfigError("eval.data must be given to evaluate. Add a table [eval.data] with kind and path.")
    scorer = make_scorer(config.reward)
    set_threads(config.trainer.num_threads)
    loaded = load_model(config.model)
    found = load_prompts(config.eval.data, loaded.tokenizer, check_label=label_check(config.reward))
    console = console or QuietConsole()
    if found.num_skipped:
        console.warn(f"eval.data: {found.num_skipped} broken lines were left out, as skip_bad_lines asks.")
    work = answer_all(
        make_engine(config, loaded),
        found.prompts,
        scorer,
        config.eval,
        max_response_tokens=config.rollout.max_response_tokens,
        stop_token_ids=config.rollout.stop_token_ids,
        seed=config.seed,
        step=0,
        decode=decoder(loaded),
        console=console,
    )
    return run_async(work)
