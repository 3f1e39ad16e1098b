"""vLLM in this process, one step at a time: the one file of strop that imports it. (A server's workers import
remote/strop_vllm.py.)"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from strop.engines.served.process import Served
from strop.engines.vllm.process import DEFAULTS, engine_args
from strop.engines.vllm.remote.strop_reload import files_of, reload
from strop.engines.vllm.remote.strop_weights import WrongWeights, check_fits, shapes_in
from strop.types import ModelError, UserError, WeightSource

_IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"  # "0" while it starts
_OWN_ARGS = ("--skip-tokenizer-init", "--no-async-scheduling", "--no-use-tqdm-on-load")
_OWN_DEFAULTS = {**DEFAULTS, "VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}


class Asked(NamedTuple):
    """One sample that is wanted."""

    name: str
    prompt: Sequence[int]
    sampling_params: Mapping[str, Any]  # in vLLM's words


class Sampled(NamedTuple):
    """One sample that has ended."""

    name: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: list[dict[str, Any]]  # which of its tokens weights of one label sampled
    reason: str
    prompt_logprobs: list[float]  # where they were asked for; 0.0 for the first


class Core:
    """vLLM's engine without a process of its own.

    What vLLM does to a process that it takes for its own is undone: the random states, and torch.set_num_threads.

    Args:
        served: the model that it begins with.
        args: more arguments, as vllm serve takes them.
        can_sleep: whether `sleep` will be called.

    Raises:
        UserError: vLLM cannot be imported, or does not start with these arguments.
    """

    def __init__(self, served: Served, args: Sequence[str], *, can_sleep: bool) -> None:
        self.check()
        for name, value in _OWN_DEFAULTS.items():
            os.environ.setdefault(name, value)
        given = [*engine_args(served), *_OWN_ARGS, *(["--enable-sleep-mode"] if can_sleep else []), *args]
        with _as_it_was():
            try:
                self._engine = _start(given)
            except (UserError, KeyboardInterrupt):
                raise
            except Exception as error:
                raise UserError(f"vLLM does not start in this process with {given}: {_first_line(error)}") from error
        folder, self._tied = files_of(self._engine.model_config)
        self._own = shapes_in(folder)
        self.max_positions = int(self._engine.model_config.max_model_len)

    @staticmethod
    def check() -> None:
        """Raises UserError where vLLM cannot be imported."""
        if find_spec("vllm") is None:
            raise UserError(
                "engine.kind = vllm_in_process needs vLLM in the environment that runs strop, and it cannot be imported. make "
                "vllm-env makes an environment that has both: .venv-vllm/bin/strop. Or use engine.kind = vllm, whose servers "
                "have an environment of their own."
            )

    def step(self, wanted: Sequence[Asked], unwanted: Sequence[str]) -> list[Sampled]:
        """Take in what is wanted, leave what is not any more, sample one token of each; the samples that this ended."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._engine.abort_request(list(unwanted))
        for one in wanted:
            params = SamplingParams(**one.sampling_params, output_kind=RequestOutputKind.FINAL_ONLY)
            prompt = tokens_input(list(one.prompt), cache_salt=self.label_now())
            self._engine.add_request(one.name, prompt, params)
        with torch.random.fork_rng(devices=()):  # a CPU's vLLM draws from it, to no purpose where samples have seeds
            return [_sampled(output) for output in self._engine.step() if output.finished]

    def update(self, weights: WeightSource, label: str) -> int:
        """Copy weights into those of the model; the bytes that were copied. Samples that have begun go on with them.

        Raises:
            ModelError: names or shapes are not those of the model, which keeps what it has.
        """
        from vllm.config import set_current_vllm_config

        try:
            check_fits({n: tuple(t.shape) for n, t in weights}, self._own, tied=self._tied)
        except WrongWeights as error:
            raise ModelError(f"weights do not fit the model of vLLM in this process: {error}") from None
        num_bytes = 0

        def stream() -> Iterator[tuple[str, Tensor]]:
            nonlocal num_bytes
            for name, tensor in weights:
                num_bytes += tensor.nbytes
                yield name, tensor.detach()

        def load(worker: Any) -> None:
            with set_current_vllm_config(worker.vllm_config), torch.no_grad():
                reload(worker.model_runner.get_model(), worker.model_config, stream())

        if torch.accelerator.is_available():  # the trainer's work, which another thread gave to the GPU, is done
            torch.accelerator.synchronize()
        self._engine.collective_rpc(load)
        self._engine.set_weight_version(label)
        return num_bytes

    def label_now(self) -> str:
        """The label of the weights that vLLM says it samples with."""
        return self._engine.get_weight_version()

    def sleep(self) -> None:
        """Keep the weights in host memory, and nothing on the GPU."""
        self._engine.sleep(level=1, mode="keep")

    def wake_up(self) -> None:
        self._engine.wake_up()

    def close(self) -> None:
        """Give up all memory; another one may be started then."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._engine.engine_core.shutdown()
        del self._engine
        cleanup_dist_env_and_memory()


def _start(args: list[str]) -> Any:
    """vLLM's engine.

    Raises:
        UserError: it would not be one that strop can use.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> Any:
            raise UserError(f"engine.engine_args must be what vllm serve takes: {message}.")

    given = EngineArgs.from_cli_args(EngineArgs.add_cli_args(Parser()).parse_args(args))
    config = given.create_engine_config()
    parallel = config.parallel_config
    is_here = parallel.distributed_executor_backend == "uni" and parallel.world_size_across_dp == 1
    for is_so, words in (
        (is_here, "in this process, with one device: servers (engine.kind = vllm) take more"),
        (
            not config.scheduler_config.async_scheduling,
            "--no-async-scheduling, or new weights would come within a step",
        ),
        (config.model_config.logprobs_mode == "processed_logprobs", "--logprobs-mode processed_logprobs"),
    ):
        if not is_so:
            raise UserError(f"engine.engine_args must leave vLLM {words}.")
    return LLMEngine(config, Executor.get_class(config), log_stats=False)


@contextmanager
def _as_it_was() -> Iterator[None]:
    """What vLLM's start changes of this process, and leaves so."""
    python, numpy_state, set_num_threads = random.getstate(), np.random.get_state(), torch.set_num_threads
    variable = os.environ.get(_IN_PROCESS)
    os.environ[_IN_PROCESS] = "0"
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads
        os.environ.pop(_IN_PROCESS)
        os.environ |= {} if variable is None else {_IN_PROCESS: variable}


def _first_line(error: Exception) -> str:
    said = str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else str(error)
    return f"{type(error).__name__}: {next(iter(said.strip().splitlines()), '')}"


def _sampled(output: Any) -> Sampled:
    (choice,) = output.outputs
    tokens = tuple(choice.token_ids)
    logprobs = tuple(
        float(at[token].logprob) for at, token in zip(choice.logprobs or (), tokens, strict=bool(choice.logprobs))
    )
    pairs = zip((output.prompt_logprobs or ())[1:], output.prompt_token_ids[1:], strict=bool(output.prompt_logprobs))
    of_prompt = [0.0, *(float(at[token].logprob) for at, token in pairs)]
    spans = [vars(span) for span in choice.weight_versions or ()]
    return Sampled(output.request_id, tokens, logprobs, spans, choice.finish_reason or "", of_prompt)
