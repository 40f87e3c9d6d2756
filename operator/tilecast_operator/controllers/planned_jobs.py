"""Where and when each job runs by the plan of the whole queue, for everybody who wants to know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from tilecast.advise import Advice
from tilecast.api.status import QueuePosition, TrainingJobStatus
from tilecast_operator.answer import Answer, Declined
from tilecast_operator.cluster.kinds import Key


class PlannedJobs:
    """The newest plan. Belongs to one event loop.

    Args:
        is_on: whether the queue is planned at all.
    """

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self._positions: dict[Key, QueuePosition] = {}
        self._is_made = False
        self.on_write: Callable[[], None] = lambda: None
        """Called once a TrainingJob says something else: it may have started, which no watch tells of what we write."""
        self._renewed = asyncio.Event()

    def get(self, key: Key) -> QueuePosition | None:
        """Where a job runs by the plan; None where the plan does not have it."""
        return self._positions.get(key)

    def left_out(self, key: Key) -> str:
        """Why the plan is without a job; empty where it has it, or nobody asked for it."""
        position = self._positions.get(key)
        return "" if position is None or position.pool else position.reason

    def renew(self, positions: Mapping[Key, QueuePosition]) -> set[Key]:
        """Take over a plan; returns the jobs that it changes something for."""
        before, self._positions = self._positions, dict(positions)
        self._is_made = True
        self._renewed.set()
        self._renewed = asyncio.Event()
        return {key for key in before.keys() | positions.keys() if before.get(key) != positions.get(key)}

    def forget(self, key: Key) -> None:
        """Let go of a job that is gone; another of its name is another job."""
        self._positions.pop(key, None)

    async def wait(self, key: Key, limit_s: float) -> None:
        """Wait until the plan has a job, and no longer than that."""
        if not self.is_on:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while key not in self._positions:
                    await self._renewed.wait()

    def stated(self, key: Key, status: TrainingJobStatus, before: TrainingJobStatus) -> TrainingJobStatus:
        """A status that says where its job runs by the plan; before there is one, what it said already."""
        is_unknown = self.is_on and not self._is_made
        position = before.queue if is_unknown else self._positions.get(key)
        return status if status.queue == position else status.model_copy(update={"queue": position})

    def preferred(self, key: Key, answer: Answer) -> Answer:
        """The answer about a job that waits, with the pool of the plan in front."""
        position = self._positions.get(key)
        if isinstance(answer, Declined) or position is None or not position.position:
            return answer
        return _led_by(answer, position)


def _led_by(advice: Advice, position: QueuePosition) -> Advice:
    """The advice with the offer of a pool first; unchanged where it has none there."""
    there = [item for item in advice.offers if item.pool.name == position.pool]
    if not there or advice.offers[0] is there[0]:
        return advice
    first = replace(there[0], reason=f"by the plan of the whole queue: {there[0].reason}")
    return replace(advice, offers=(first, *(item for item in advice.offers if item is not there[0])))
