"""The teachers of a run: opened and compared with the student before anything is trained, then asked in every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from strop import interrupts, ops
from strop.config import DistillationOptions, ModelOptions, TrainConfig, is_address
from strop.data import Batch
from strop.engines.remote_logprobs import RemoteLogprobs
from strop.observe.console import Console
from strop.runtime.models import LoadedModel, check_length, load_model, vocab_size
from strop.runtime.vocabularies import check_same_texts, check_same_vocabulary
from strop.trainers.teacher import FrozenModel
from strop.types import DataError, GuardError, Metric, ModelError, Prompt, StepMetrics


class Teacher(Protocol):
    """A model that scores what another one sampled."""

    def logprobs(self, batch: Batch, *, temperature: float, advance: Callable[[int], None]) -> Tensor:
        """Log-probabilities [T] of the trainable tokens, 0 elsewhere."""
        ...

    def fingerprint(self) -> str:
        """Another one for another teacher."""
        ...


class Teachers:
    """Teachers by source of the data, each loaded once however many sources it has."""

    def __init__(self, options: DistillationOptions, by_place: dict[str, Teacher], *, temperature: float) -> None:
        self._options, self._by_place, self._temperature = options, by_place, temperature
        self._metrics: StepMetrics = {}

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Of each source's teacher; "" is the one of all other sources."""
        of_place = {place: teacher.fingerprint() for place, teacher in self._by_place.items()}
        found = {source: of_place[place] for source, place in sorted(self._options.teachers.items())}
        return found if self._options.teacher is None else {"": of_place[self._options.teacher], **found}

    def advantages(self, batch: Batch, sources: Sequence[str | None], console: Console) -> Tensor:
        """What the teachers add to the advantages [T] of a batch whose old_logprobs are there; `sources`: of its sequences.

        Raises:
            GuardError: a log-probability of a teacher is not finite.
        """
        assert batch.old_logprobs is not None
        with console.phase("teacher", batch.num_sequences), interrupts.interruptible():
            found = self._logprobs(batch, sources, console)
        _check_finite(batch, found)
        self._measure(batch, found, sources)
        return ops.distillation_advantages(
            batch.old_logprobs,
            found,
            batch.loss_mask,
            batch.sequence_ids,
            coef=self._options.teacher_coef,
            gamma=self._options.teacher_gamma,
        )

    def _logprobs(self, batch: Batch, sources: Sequence[str | None], console: Console) -> Tensor:
        found, done = torch.zeros(batch.tokens.shape, dtype=torch.float32), 0
        places = [place_of(self._options, source) for source in sources]
        for place, teacher in self._by_place.items():
            sequences = [s for s, other in enumerate(places) if other == place]
            part = batch.select(sequences)
            if part.loss_mask.any():
                advance = lambda more, before=done: console.advance(before + more)  # noqa: E731
                numbers = teacher.logprobs(part, temperature=self._temperature, advance=advance)
                found[batch.positions(sequences)] = numbers
            done += len(sequences)
        return found

    def _measure(self, batch: Batch, teacher_logprobs: Tensor, sources: Sequence[str | None]) -> None:
        """The reverse KL per token, of all and of each source."""
        assert batch.old_logprobs is not None
        mask = batch.loss_mask
        distance = torch.where(mask, batch.old_logprobs - teacher_logprobs, 0.0).double()
        zeros = torch.zeros(batch.num_sequences, dtype=torch.float64)
        sums = zeros.index_add(0, batch.sequence_ids, distance).tolist()
        counts = zeros.index_add(0, batch.sequence_ids, mask.double()).tolist()
        found = {"reverse_kl": Metric.mean(sum(sums), sum(counts))}
        for source in sorted({source for source in sources if source is not None}):
            places = [s for s, other in enumerate(sources) if other == source]
            found[f"reverse_kl/of/{source}"] = Metric.mean(sum(sums[s] for s in places), sum(counts[s] for s in places))
        self._metrics = found

    def take_metrics(self) -> StepMetrics:
        """What was measured since the last call."""
        found, self._metrics = self._metrics, {}
        return found


def place_of(options: DistillationOptions, source: str | None) -> str | None:
    """Folder or address of the teacher of a source; None where it has none."""
    return options.teacher if source is None else options.teachers.get(source, options.teacher)


_ROUNDING = 1e-2  # by which the log-probability of a certain token may exceed 0 in a narrow type


def _check_finite(batch: Batch, teacher_logprobs: Tensor) -> None:
    above = teacher_logprobs > _ROUNDING
    wrong = (batch.loss_mask & (above | ~teacher_logprobs.isfinite())).nonzero().flatten().tolist()
    if wrong:
        name = batch.names[int(batch.sequence_ids[wrong[0]])]
        token = int(batch.tokens[wrong[0]])
        got = float(teacher_logprobs[wrong[0]])
        reason = "to this teacher the token is impossible" if got == -math.inf else "this teacher's numbers are broken"
        raise GuardError(
            f"a teacher's log-probability must be finite and at most 0, got {got} for token id {token} of {name} "
            f"({len(wrong)} such tokens in the batch). The step was not made: {reason}."
        )


def open_teachers(
    config: TrainConfig, student: LoadedModel, prompts: Sequence[Prompt], console: Console
) -> Teachers | None:
    """The teachers that `[distillation]` names, each checked against the student; None where it names none.

    Raises:
        UserError: a prompt has no teacher, a source has no prompt, a teacher cannot be had, or it does not fit the student.
    """
    options = config.distillation
    if not options.is_on:
        return None
    _check_sources(options, prompts)
    by_place: dict[str, Teacher] = {}
    for place in options.places:
        mine = [p for p in prompts if place_of(options, p.source) == place]
        longest = max(mine, key=lambda p: len(p.tokens))
        by_place[place] = (_remote if is_address(place) else _local)(config, place, student, longest)
        interrupts.check()
    names = ", ".join(f"{source or 'others'}: {place}" for source, place in _named(options))
    console.note(f"teacher of {names}" if options.teachers else f"teacher: {options.teacher}")
    return Teachers(options, by_place, temperature=config.rollout.temperature)


def _named(options: DistillationOptions) -> list[tuple[str, str]]:
    return [*options.teachers.items(), *([("", options.teacher)] if options.teacher is not None else [])]


def _check_sources(options: DistillationOptions, prompts: Sequence[Prompt]) -> None:
    there = {p.source for p in prompts}
    for source in options.teachers:
        if source not in there:
            known = ", ".join(sorted(s for s in there if s is not None)) or "none"
            raise DataError(
                f"distillation.teachers.{source} must be named for a source of the data, and no prompt has it. "
                f"Its sources: {known}."
            )
    if options.teacher is not None and there <= set(options.teachers):
        raise DataError(
            f"distillation.teacher = {options.teacher} must have a prompt to teach, and every source of the data has a teacher "
            "of its own. Leave it out."
        )
    without = next((p for p in prompts if place_of(options, p.source) is None), None)
    if without is not None:
        what = "no source" if without.source is None else f"source {without.source}"
        raise DataError(
            f"distillation.teachers must name a teacher for every prompt, and prompt row {without.row} has {what}. "
            "Name one for it, or set distillation.teacher for all that are not named."
        )


class _LocalTeacher:
    def __init__(self, loaded: LoadedModel, *, named: str, max_tokens_per_micro_batch: int) -> None:
        self._named, self._size = named, vocab_size(loaded.model)
        self._model = FrozenModel(loaded.model, max_tokens_per_micro_batch=max_tokens_per_micro_batch)

    def logprobs(self, batch: Batch, *, temperature: float, advance: Callable[[int], None]) -> Tensor:
        largest = int(batch.tokens.max())
        if largest >= self._size:
            raise ModelError(
                f"{self._named} knows token ids up to {self._size - 1}, and the model sampled {largest}, which no tokenizer "
                "has a text for. Use a teacher with as many rows in its embedding."
            )
        found = self._model.logprobs(batch, temperature=temperature)
        advance(batch.num_sequences)
        return found

    def fingerprint(self) -> str:
        return self._model.fingerprint()


def _local(config: TrainConfig, place: str, student: LoadedModel, longest: Prompt) -> Teacher:
    options, named = config.distillation, config.distillation.option_of(place)
    loaded = load_model(
        ModelOptions(
            path=place,
            dtype=options.teacher_dtype or config.model.dtype,
            device=options.teacher_device or config.model.device,
            trust_remote_code=config.model.trust_remote_code,
        ),
        option=named,
        device_option="model.device" if options.teacher_device is None else "distillation.teacher_device",
    )
    named = f"{named} = {place!r}"
    check_same_vocabulary(student, loaded, named=named)
    limit = config.rollout.max_response_tokens
    where = f"{named}: prompt row {longest.row}"
    check_length(
        loaded.model, where, len(longest.tokens), option="rollout.max_response_tokens", max_response_tokens=limit
    )
    return _LocalTeacher(loaded, named=named, max_tokens_per_micro_batch=config.trainer.max_tokens_per_micro_batch)


class _RemoteTeacher:
    def __init__(self, server: RemoteLogprobs) -> None:
        self._server = server

    def logprobs(self, batch: Batch, *, temperature: float, advance: Callable[[int], None]) -> Tensor:
        assert temperature == 1, "a rule of the config"
        sequences = [tokens.tolist() for tokens in batch.tokens.split(batch.lengths)]
        rows = self._server.logprobs(sequences, advance=advance)
        found = torch.tensor([number for row in rows for number in row], dtype=torch.float32)
        return torch.where(batch.loss_mask, found, 0.0)

    def fingerprint(self) -> str:
        return f"server of {self._server.model}"


def _remote(config: TrainConfig, place: str, student: LoadedModel, longest: Prompt) -> Teacher:
    options = config.distillation
    server = RemoteLogprobs(
        place, option=options.option_of(place), timeout_s=options.request_timeout_s, num_retries=options.num_retries
    )
    check_same_texts(student, server.detokenize, named=f"{server!r}")
    needed = (
        len(longest.tokens) + config.rollout.max_response_tokens + 1
    )  # the server samples a token that nobody reads
    if server.max_positions is not None and needed > server.max_positions:
        raise DataError(
            f"{server!r}: prompt row {longest.row} has {len(longest.tokens)} tokens; with rollout.max_response_tokens = "
            f"{config.rollout.max_response_tokens} and one more it does not fit the server's {server.max_positions} positions."
        )
    return _RemoteTeacher(server)
