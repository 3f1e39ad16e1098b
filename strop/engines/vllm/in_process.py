"""The engine `vllm_in_process`: samples with vLLM in this process, which is given the trainer's weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, ClassVar

from strop.config import VLLMInProcessOptions
from strop.engines.fit import check_request, check_weights, to_read_twice
from strop.engines.served.process import Served
from strop.engines.served.server import check_finite, end_of_sample, versions_of
from strop.engines.vllm.core import Asked, Core, Sampled
from strop.engines.vllm.samples import SCORE, sample_body
from strop.types import (
    Completion,
    EngineError,
    GenerateRequest,
    Metric,
    StepMetrics,
    StropError,
    UserError,
    WeightSource,
)


class VLLMInProcess:
    """Samples with vLLM in this process.

    vLLM is started when the first sample or the first weights come, and is given the weights that the engine was made with,
    whatever it began with. Like the engine `torch` it makes one step after the other on the event loop, so that a run is made
    the same way again: requests join between two steps, and so do new weights, which samples in flight go on with. Every token
    comes with the label of the weights that sampled it.

    Args:
        options: `[engine]`.
        served: the model that vLLM begins with.
        weights: what is sampled from until others come; looked at when the first sample is asked for.
        stop_token_ids: ids that end a response (they stay its last token).
        tell: told when vLLM is started.
    """

    core: ClassVar[Callable[..., Any]] = Core  # an audit and tests put something else in its place

    def __init__(
        self,
        options: VLLMInProcessOptions,
        served: Served,
        weights: WeightSource,
        *,
        stop_token_ids: Iterable[int],
        tell: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.options, self.stop_token_ids, self.policy_version = options, frozenset(stop_token_ids), 0
        self._served, self._tell = served, tell
        self._weights = to_read_twice(weights)
        self._own = {name: tuple(tensor.shape) for name, tensor in self._weights}
        self._core: Any = None
        self._refusal: UserError | None = None  # what vLLM did not start for
        self._versions: dict[str, int] = {}  # label to policy version; empty: no weights were given yet
        self._is_asleep = False
        self._names, self._wanted, self._unwanted = count(), list[Asked](), list[str]()  # told before the next step
        self._waits: dict[str, asyncio.Future[Sampled]] = {}
        self._driver: asyncio.Task[None] | None = None
        self._first: StepMetrics = {}  # of the weights that were given before the first sample

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """One completion per seed, in the order of the seeds.

        Raises:
            UserError: vLLM is not there, or does not start, or the request is too long for it.
            EngineError: vLLM failed.
        """
        if not request.seeds:
            return []
        self._make_ready()
        longer = "give vLLM a larger --max-model-len (engine.engine_args)"
        check_request(request, self._core.max_positions, of="vLLM's", or_else=longer)
        bodies = [sample_body(request, seed, self.stop_token_ids, "") for seed in request.seeds]
        found = await self._sampled(request.prompt_tokens, [body["sampling_params"] for body in bodies])
        return [self._completion(one, request) for one in found]

    def _completion(self, found: Sampled, request: GenerateRequest) -> Completion:
        tokens, logprobs = found.tokens, found.logprobs
        versions = versions_of(found.spans, self._versions)
        if not len(logprobs) == len(versions) == len(tokens):
            raise EngineError("vLLM must give a log-probability and a version with every token.")
        check_finite(logprobs)
        end = end_of_sample(found.reason, tokens, request, self.stop_token_ids, name="vLLM")
        return Completion(tokens, logprobs, versions, end)

    async def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of each token after those before it, at temperature 1; 0.0 for the first."""
        self._make_ready()
        (found,) = await self._sampled(tokens, [SCORE])
        return found.prompt_logprobs

    async def update_weights(self, weights: WeightSource, policy_version: int) -> StepMetrics:
        """Copy these weights into vLLM's.

        Returns:
            What was copied, and how long that took.

        Raises:
            ModelError: they are not those of the model; vLLM keeps what it has.
        """
        self._open()
        found = self._give(weights, policy_version)
        first, self._first = self._first, {}
        return {name: metric + first[name] if name in first else metric for name, metric in found.items()}

    def _give(self, weights: WeightSource, policy_version: int) -> StepMetrics:
        weights = to_read_twice(weights)
        check_weights({name: tuple(t.shape) for name, t in weights}, self._own, of="the engine's model")
        began, label = time.monotonic(), f"{policy_version}:{len(self._versions)}"
        num_bytes = _asked(self._core.update, weights, label)
        said = self._core.label_now()
        if said != label:
            raise EngineError(f"vLLM must hold weights {label} after its update, and says {said}.")
        self._versions[label], self.policy_version = policy_version, policy_version
        return {"weights_bytes": Metric("sum", num_bytes), "seconds/weights": Metric("sum", time.monotonic() - began)}

    async def rest(self) -> None:
        """With `engine.sleep` vLLM gives up the memory of the GPU until weights come or a sample is asked for."""
        if self.options.sleep and self._core is not None and not self._is_asleep:
            _asked(self._core.sleep)
            self._is_asleep = True

    async def close(self) -> None:
        """End what is in flight, and vLLM."""
        if self._driver is not None and not self._driver.done():
            self._driver.cancel()
        core, self._core, self._versions, self._is_asleep = self._core, None, {}, False
        if core is not None:
            core.close()

    def _make_ready(self) -> None:
        """vLLM is there, awake, and holds weights of this run."""
        self._open()
        if not self._versions:
            self._first = self._give(self._weights, self.policy_version)

    def _open(self) -> None:
        """vLLM is there, and awake."""
        if self._refusal is not None:  # told once, and not tried again for every prompt
            raise self._refusal
        if self._core is None:
            self._tell("vLLM starts in this process")
            try:
                self._core = type(self).core(self._served, self.options.engine_args, can_sleep=self.options.sleep)
            except UserError as error:
                self._refusal = error
                raise
        elif self._is_asleep:
            _asked(self._core.wake_up)
            self._is_asleep = False

    # ---- steps --------------------------------------------------------------------------------------------------------

    async def _sampled(self, prompt: Sequence[int], params: Sequence[Mapping[str, Any]]) -> list[Sampled]:
        """A sample of a prompt for each of these, in their order."""
        asked = [Asked(str(next(self._names)), prompt, one) for one in params]
        waits = {one.name: asyncio.get_running_loop().create_future() for one in asked}
        self._wanted += asked
        self._waits |= waits
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            return list(await asyncio.gather(*waits.values()))
        finally:  # nobody waits any more for those of a request that was cancelled
            self._unwanted += [name for name in waits if self._waits.pop(name, None) is not None]

    async def _drive(self) -> None:
        """Make steps until nobody waits. Yields to other tasks after every step."""
        try:
            while self._waits:
                wanted = [one for one in self._wanted if one.name in self._waits]
                unwanted, self._wanted, self._unwanted = self._unwanted, [], []
                for one in _asked(self._core.step, wanted, unwanted):
                    wait = self._waits.pop(one.name)
                    if not wait.done():  # cancelled just now
                        wait.set_result(one)
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._fail(asyncio.CancelledError())
            raise
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        waits, self._waits, self._wanted = self._waits, {}, []
        self._unwanted += waits
        for wait in waits.values():
            if not wait.done():
                wait.set_exception(error) if isinstance(error, Exception) else wait.cancel()


def _asked(work: Callable[..., Any], *given: Any) -> Any:
    """What vLLM answers.

    Raises:
        EngineError: it failed.
    """
    try:
        return work(*given)
    except StropError:
        raise
    except Exception as error:
        raise EngineError(
            f"vLLM failed in this process: {type(error).__name__}: {error}. With VLLM_LOGGING_LEVEL=INFO it says more."
        ) from error
