"""The engine `torch`: samples in this process from the trainer's own weights, with continuous batching."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from strop.engines.choose import choose_decoder
from strop.engines.decoders import Decoder, max_positions
from strop.engines.fit import check_request, check_weights, to_read_twice
from strop.engines.slots import Slots
from strop.types import (
    Completion,
    GenerateRequest,
    StepMetrics,
    StropError,
    UserError,
    model_failure,
)

MAX_PREFILL_TOKENS = 8192  # prompt positions read in one forward pass


@dataclass(eq=False)
class _Job:
    """A request on its way: samples not yet started, and those that are done."""

    request: GenerateRequest
    done: asyncio.Future[list[Completion]]
    waiting: deque[int] = field(default_factory=deque)
    finished: dict[int, Completion] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Sample:
    """One sample of a request, in a slot."""

    job: _Job
    index: int


class TorchEngine:
    """Samples from a Hugging Face model in this process.

    Requests join a queue; free slots are filled from it at every step, each prompt is read once for the samples of its
    group that start together, and a finished sample's slot is free for the next at once. Each sample draws from the
    stream of its own seed.

    Args:
        model: a Hugging Face causal language model, on its device. Shared with the trainer, so weights need no transfer.
        stop_token_ids: ids that end a response (they stay its last token).
        max_sequences: slots at most.
        max_cache_tokens: positions of the cache over all slots at most; None: as many as all slots take.

    Raises:
        ModelError: the model cannot be sampled from in rows of unequal length.
    """

    def __init__(
        self,
        model: Any,
        *,
        stop_token_ids: Iterable[int],
        max_sequences: int = 64,
        max_cache_tokens: int | None = None,
    ) -> None:
        self.model = model.eval()
        self.stop_token_ids = frozenset(stop_token_ids)
        self.max_sequences, self.max_cache_tokens = max_sequences, max_cache_tokens
        self._max_positions = max_positions(model)
        self._decoder_kind = choose_decoder(model)
        self.policy_version = 0
        self.num_sampled_tokens = 0  # since the engine was made, for progress
        self._queue: deque[_Job] = deque()
        self._active: list[_Sample] = []  # entry i is in slot i
        self._slots = Slots(max_sequences, self._device)
        self._decoder: Decoder | None = None
        self._widths, self._num_slots = (
            (0, 0),
            0,
        )  # positions of prompt and response in a slot, and how many slots there are
        self._driver: asyncio.Task[None] | None = None

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """One completion per seed, in the order of the seeds."""
        self._check(request)
        if not request.seeds:
            return []
        job = _Job(request, asyncio.get_running_loop().create_future(), deque(range(len(request.seeds))))
        self._queue.append(job)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        return await job.done

    @torch.no_grad()
    async def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of each token after those before it, at temperature 1; 0.0 for the first."""
        ids = torch.tensor([list(tokens)], device=self._device)
        logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        return [0.0, *logits.log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1).tolist()]

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> StepMetrics:
        """Take weights by name. Tensors that are this model's own are only counted; a tied head follows its embedding.

        Raises:
            ModelError: they are not those of the model, which keeps what it has.
        """
        weights = to_read_twice(weights)
        own = dict(self.model.named_parameters())
        given = {name: tuple(tensor.shape) for name, tensor in weights}
        check_weights(given, {name: tuple(p.shape) for name, p in own.items()}, of="the engine's model")
        with torch.no_grad():
            for name, tensor in weights:
                if own[name].data_ptr() != tensor.data_ptr():
                    own[name].copy_(tensor)
        self.policy_version = policy_version
        if self._decoder is not None:
            self._decoder.forget()
        return {}

    async def rest(self) -> None:
        """It keeps nothing that training could use, beside the trainer's own weights."""

    async def close(self) -> None:
        """End what is in flight."""
        if self._driver is not None and not self._driver.done():
            self._driver.cancel()
        self._decoder = None

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _check(self, request: GenerateRequest) -> None:
        check_request(request, self._max_positions, of="the model's")
        most = self.max_cache_tokens
        if most is not None and request.num_positions > most:
            raise UserError(
                f"engine.max_cache_tokens must hold a whole prompt and response, got {most} for {len(request.prompt_tokens)} "
                f"prompt tokens + {request.sampling.max_response_tokens} response tokens."
            )

    async def _drive(self) -> None:
        """Fill slots, sample one token in each, until nobody waits. Yields to other tasks after every step."""
        try:
            await asyncio.sleep(0)  # requests of the same moment start together
            while self._queue or self._active:
                self._advance()
                await asyncio.sleep(0)
            if self._decoder is not None:
                self._decoder.forget()
        except asyncio.CancelledError:
            self._fail(asyncio.CancelledError())
            raise
        except StropError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            rows = f"{len(self._active)} slots of up to {sum(self._widths)} tokens"
            failure = model_failure(error, self.model, rows, option="engine.max_sequences or the response limit")
            failure.__cause__ = error
            self._fail(failure)

    def _fail(self, error: BaseException) -> None:
        for job in {*self._queue, *(s.job for s in self._active)}:
            if not job.done.done():
                job.done.set_exception(error) if isinstance(error, Exception) else job.done.cancel()
        self._queue.clear()
        self._active.clear()
        self._decoder = None  # what a broken model wrote into the cache must not reach anybody

    @torch.inference_mode()
    def _advance(self) -> None:
        """One token for every slot: those in flight, and those that a prefill has just filled."""
        self._forget_cancelled()
        num_flying = len(self._active)
        if num_flying:
            assert self._decoder is not None
            self._take(slice(0, num_flying), self._decoder.decode(self._slots.last_tokens(num_flying)))
        logits = self._start_waiting()
        if logits is not None:
            self._take(slice(num_flying, len(self._active)), logits)
        self._retire()

    def _take(self, part: slice, logits: Tensor) -> None:
        self._slots.take(part, logits, self.policy_version)
        self.num_sampled_tokens += part.stop - part.start

    def _forget_cancelled(self) -> None:
        """Nobody waits for a cancelled request: its samples leave."""
        self._queue = deque(job for job in self._queue if not job.done.done())
        for slot in reversed(range(len(self._active))):
            if self._active[slot].job.done.done():
                self._free(slot)

    def _start_waiting(self) -> Tensor | None:
        """Move samples from the queue into free slots, read their prompts, and return the logits of their first tokens."""
        prompts: list[tuple[int, ...]] = []
        slots: list[list[int]] = []
        longest = 0
        self._grow()
        while self._queue and len(self._active) < self._num_slots:
            job = self._queue[0]
            longest = max(longest, len(job.request.prompt_tokens))
            too_much = prompts and longest * (len(prompts) + 1) > MAX_PREFILL_TOKENS
            if too_much or not self._fits(job.request):
                break
            prompts.append(job.request.prompt_tokens)
            slots.append(self._fill_slots(job))
            if not job.waiting:
                self._queue.popleft()
        if not prompts:
            return None
        assert self._decoder is not None
        logits = self._decoder.prefill(prompts, slots)
        rows = torch.arange(len(prompts)).repeat_interleave(torch.tensor([len(s) for s in slots]))
        return logits[rows.to(logits.device)]

    def _fill_slots(self, job: _Job) -> list[int]:
        """As many samples of a request as there are free slots."""
        group, request = [], job.request
        while job.waiting and len(self._active) < self._num_slots:
            slot, index = len(self._active), job.waiting.popleft()
            stop_ids = self.stop_token_ids | set(request.sampling.stop_token_ids)
            self._slots.start(slot, request.seeds[index], request.sampling, stop_ids)
            self._active.append(_Sample(job, index))
            group.append(slot)
        return group

    def _grow(self) -> None:
        """Slots for the longest prompt and the longest response that wait, as many as may be; made anew only while none is in
        use. Under a bound only what comes first in the queue counts, as far as it fits."""
        if self._active or not self._queue:
            return
        wanted = (0, 0)
        for job in self._queue:
            wider = _wider(wanted, _widths(job.request))
            if sum(wanted) and not self._slots_of(wider):
                break
            wanted = wider
        widths = _wider(wanted, self._widths)
        if self._slots_of(widths) < self._slots_of(wanted):
            widths = wanted  # narrower slots are more
        if self._decoder is not None and widths == self._widths:
            return
        self._decoder = None  # its memory is free before the new one takes as much
        self._widths, self._num_slots = widths, self._slots_of(widths)
        prompt, response = widths
        self._decoder = self._decoder_kind(
            self.model, num_slots=self._num_slots, prompt_width=prompt, response_width=response
        )

    def _slots_of(self, widths: tuple[int, int]) -> int:
        if self.max_cache_tokens is None:
            return self.max_sequences
        return min(self.max_sequences, self.max_cache_tokens // sum(widths))

    def _fits(self, request: GenerateRequest) -> bool:
        return _wider(self._widths, _widths(request)) == self._widths

    def _retire(self) -> None:
        """Hand finished samples over and close the gaps they leave."""
        for slot in self._slots.finished(len(self._active)):
            sample = self._active[slot]
            job = sample.job
            job.finished[sample.index] = self._slots.completion(slot)
            self._free(slot)
            if len(job.finished) == len(job.request.seeds):
                job.done.set_result([job.finished[i] for i in range(len(job.request.seeds))])

    def _free(self, slot: int) -> None:
        """The last slot in use takes the place of one that ends."""
        last = len(self._active) - 1
        if slot != last:
            assert self._decoder is not None
            self._decoder.move(last, slot)
            self._slots.move(last, slot)
            self._active[slot] = self._active[last]
        self._active.pop()


def _widths(request: GenerateRequest) -> tuple[int, int]:
    """Tokens of a prompt, and of the longest response."""
    return len(request.prompt_tokens), request.sampling.max_response_tokens


def _wider(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), max(one[1], other[1])
