"""Groups that are sampled all the time: a step takes those that are complete, and new weights come to those in flight."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from strop import interrupts
from strop.rewards import Scored
from strop.rollout import TokenBudget, end_tasks, not_there
from strop.runtime.beside import beside
from strop.runtime.collect import (
    age,
    newest_tokens,
    next_prompts,
    observe,
    rollout_metrics,
    rollouts_of_step,
    sample_one,
    score,
    staleness,
    tell_of_added_rewards,
    too_few,
)
from strop.runtime.collectors import AsideConsole, give_weights, sampling_part, taken_before
from strop.runtime.session import Place, Session
from strop.types import Group, Metric, Prompt, Rollout, StepMetrics, WaitError, merge_metrics

T = TypeVar("T")


class Streaming:
    """Keeps so many groups on their way that after step s those of the steps up to s + 1 + K are, K = max_off_policy_steps //
    updates_per_batch.

    A step starts when its number of groups is sampled, scored and let through by the filters; the groups that were begun first
    are taken first. After each step the engine is given the new weights, with which the samples in flight go on: their tokens
    say which version each is of. A group whose oldest token would be more than max_off_policy_steps older than the weights of
    the step is dropped, and another prompt takes its place. Groups are scored one by one, as they come.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._ahead = session, sampling_part(session)
        self._options, self._budget = session.config.rollout, TokenBudget(session.config.rollout.max_tokens_in_flight)
        self._begin(list(session.waiting), session.counts)
        self._ahead.waiting = ()

    def _begin(self, ready: list[Group], counts: StepMetrics) -> None:
        self._ready, self._counts = ready, [counts]
        self._said = dict[int, StepMetrics]()  # of each group that is scored, as it was before the filters
        self._sampling: dict[int, Prompt] = {}  # in flight, by their numbers
        self._scoring: dict[int, Prompt] = {}  # sampled, and not scored yet
        self._dropped = Counter[str]()  # by filters, since the last step
        self._made = self._num_taken = self._session.step  # steps made; steps whose groups were taken
        self._tasks = set[asyncio.Task[Any]]()
        self._failures: list[BaseException] = []
        self._news, self._last_end, self._stream = asyncio.Event(), time.monotonic(), None

    async def start(self) -> None:
        await give_weights(self._session)
        self._stream = self._ahead.scorer.stream(self._take_scored, self._fail)
        self._admit()

    async def take(self) -> tuple[list[Rollout], StepMetrics]:
        session, wanted = self._session, self._options.prompts_per_step
        try:
            with session.console.phase("wait", wanted, is_idle=True):
                self._check()
                before = taken_before(session)
                while before is None and self._num_usable() < wanted:
                    await self._until_news()
                    self._check()
        except asyncio.CancelledError:
            self.mark_place()
            raise
        rollouts, metrics = self._take_groups(wanted) if before is None else before
        self._num_taken += 1
        self._ahead.step = self._num_taken
        metrics = merge_metrics([metrics, *self._take_counts()])
        now = session.trainer.num_steps
        return rollouts, metrics | self._queues() | _versions(rollouts) | staleness(rollouts, now)

    def _take_groups(self, wanted: int) -> tuple[list[Rollout], StepMetrics]:
        """The groups that were begun first, of those that are complete."""
        self._ready.sort(key=lambda group: group.group_id)
        groups, self._ready = self._ready[:wanted], self._ready[wanted:]
        rollouts, metrics = rollouts_of_step(self._ahead, groups)
        return rollouts, merge_metrics([metrics, *(self._said_of(group) for group in groups)])

    async def train(self, make_step: Callable[[], T]) -> T:
        return await beside(make_step)

    async def share(self, *, holds: bool) -> StepMetrics:
        if self._session.guards.wants_checkpoint:
            return await self.restart()
        metrics = await give_weights(self._session)
        self._made = self._session.step
        self._admit()
        await asyncio.sleep(0)  # a cancelled run hears of it here, however much is ready for the next step
        return metrics

    async def restart(self) -> StepMetrics:
        await self.close()
        self._begin([], {})
        self._ahead.step, self._ahead.owed = self._session.step, ()
        await self.start()
        return {}

    def mark_place(self) -> None:
        """Groups that are scored are kept; prompts whose groups are not yet are sampled again, from their seeds."""
        ahead = self._ahead
        on_their_way = self._scoring | self._sampling
        owed = tuple((number, prompt.row) for number, prompt in sorted(on_their_way.items()))
        counts = merge_metrics([*self._counts, self._drop_counts()])
        self._session.place = Place(
            ahead.cursor.state(),
            ahead.num_prompts_sampled,
            tuple(self._ready),
            (*owed, *ahead.owed),
            self._session.ahead,
            counts,
        )

    async def close(self) -> None:
        await end_tasks(list(self._tasks))
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _admit(self) -> None:
        """Begin with as many prompts as there is room for."""
        per_step, num_steps = self._options.prompts_per_step, self._session.config.run.num_steps
        whole = len(self._session.ahead)  # batches of a checkpoint that are there already
        steps_ahead = self._made + self._session.config.batches_ahead - self._num_taken - whole
        wanted = min(
            steps_ahead * per_step + self._options.round_size, (num_steps - self._num_taken - whole) * per_step
        )
        on_their_way = len(self._sampling) + len(self._scoring) + len(self._ready)
        for number, prompt in next_prompts(self._ahead, max(0, wanted - on_their_way)):
            self._sampling[number] = prompt
            self._spawn(self._sample(number, prompt))

    async def _sample(self, number: int, prompt: Prompt) -> None:
        group = await sample_one(self._ahead, number, prompt, self._budget)
        self._scoring[number] = self._sampling.pop(number)
        self._last_end = time.monotonic()
        if self._stream is not None:
            self._stream.put(group)
            return
        (scored,), counts = await score(self._ahead, [group], None)
        self._put(scored, counts)

    def _take_scored(self, group: Group, scored: Scored) -> None:
        tell_of_added_rewards(self._ahead, scored.rollouts)
        self._put(replace(group, rollouts=scored.rollouts), scored.metrics)

    def _put(self, group: Group, counts: StepMetrics) -> None:
        """A group is scored."""
        observe(self._ahead, [group])
        self._said[group.group_id] = rollout_metrics(group.rollouts)
        with interrupts.interruptible():
            filtered = self._ahead.filters([group])
        self._counts.append(counts)
        self._drop(filtered.dropped, [] if filtered.groups else [group])
        self._ready += filtered.groups
        del self._scoring[group.group_id]
        self._admit()
        self._news.set()

    def _num_usable(self) -> int:
        """How many groups are complete. Those that are too old leave, and others are begun."""
        now, most = self._session.trainer.num_steps, self._options.max_off_policy_steps
        too_old = [g for g in self._ready if any(age(r, now) > most for r in g.rollouts if r.num_response_tokens)]
        if too_old:
            left = {group.group_id for group in too_old}
            self._ready = [group for group in self._ready if group.group_id not in left]
            self._drop(Counter(), too_old)
            self._counts.append({"dropped/stale": Metric("sum", len(too_old))})
            self._admit()
        return len(self._ready)

    def _drop(self, reasons: Counter[str], groups: list[Group]) -> None:
        """Count groups that no step learns from; what they earned counts as it does for those that one does."""
        self._dropped += reasons
        self._counts += [self._said_of(group) for group in groups]

    def _said_of(self, group: Group) -> StepMetrics:
        return self._said.pop(group.group_id, None) or rollout_metrics(group.rollouts)

    def _drop_counts(self) -> StepMetrics:
        return self._ahead.filters.metrics(self._dropped) if self._ahead.config.filter.drops_groups else {}

    def _take_counts(self) -> list[StepMetrics]:
        """What was counted since the last step."""
        assert isinstance(self._ahead.console, AsideConsole)
        most = self._budget.most_in_flight
        found = [
            {"dropped/stale": Metric("sum", 0)},
            *self._counts,
            self._drop_counts(),
            self._ahead.cursor.metrics(),
            self._ahead.console.take_seconds("score"),
            {} if self._budget.limit is None else {"tokens_in_flight": Metric("max", most)},
        ]
        self._counts, self._dropped = [], Counter()
        return found

    def _queues(self) -> StepMetrics:
        return {
            "queue/groups_in_flight": Metric("sum", len(self._sampling)),
            "queue/groups_to_score": Metric("sum", len(self._scoring)),
            "queue/ready_groups": Metric("sum", len(self._ready)),
        }

    def _check(self) -> None:
        """Raise what a task raised, and where filters leave too little."""
        if self._failures:
            raise self._failures[0]
        options, of_groups = self._session.config.filter, ("no_reward", "equal_rewards", "group_filter")
        num_dropped = sum(self._dropped[reason] for reason in of_groups)
        if num_dropped >= options.max_rounds * self._options.round_size:
            raise too_few(self._ahead, len(self._ready), num_dropped, self._dropped)

    async def _until_news(self) -> None:
        limit_s, prompts = self._options.timeout_s, list(self._sampling.values())
        left_s = None
        if prompts:
            left_s = self._last_end + limit_s - time.monotonic()
            if left_s <= 0:
                missing = not_there(prompts, self._options.group_size)(list(range(len(prompts))))
                raise WaitError(
                    f"rollout.timeout_s = {limit_s:g} s went by in which the engine finished no prompt: {missing}."
                )
        self._news.clear()
        try:
            async with asyncio.timeout(left_s):
                await self._news.wait()
        except TimeoutError:
            return  # looked at above

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failures.append(error)
        self._news.set()


def _versions(rollouts: list[Rollout]) -> StepMetrics:
    """How many responses have tokens of more than one version, and how many tokens are older than their response's last."""
    newest = [newest_tokens(rollout) for rollout in rollouts]
    num_tokens = sum(rollout.num_response_tokens for rollout in rollouts)
    mixed = sum(sum(last) < rollout.num_response_tokens for last, rollout in zip(newest, rollouts, strict=True))
    older = num_tokens - sum(map(sum, newest))
    return {"mixed_versions": Metric.mean(mixed, len(rollouts)), "older_tokens": Metric.mean(older, num_tokens)}
