"""A cap on how many tokens are sampled at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TokenBudget:
    """Lets requests in, first come, first served, while their tokens fit under a limit.

    Args:
        limit: tokens in flight at most; None means no limit. Each request alone must fit.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit, self.in_flight, self.most_in_flight = limit, 0, 0
        self._door = asyncio.Lock()  # first come, first served: a large request is not overtaken for ever
        self._freed = asyncio.Condition()

    @asynccontextmanager
    async def holding(self, num_tokens: int) -> AsyncIterator[None]:
        """Wait until so many tokens fit, and hold them for as long as this lasts."""
        if self.limit is None:
            yield
            return
        async with self._door, self._freed:
            await self._freed.wait_for(lambda: self.in_flight + num_tokens <= (self.limit or 0))
            self.in_flight += num_tokens
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            yield
        finally:
            self.in_flight -= num_tokens
            async with self._freed:
                self._freed.notify_all()
