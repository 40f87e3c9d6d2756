"""Position of each job in the queue plan, shared by all controllers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from tilecast.advice import Advice
from tilecast.api.status import QueuePosition, TrainingJobStatus
from tilecast_operator.kube.controller_state import ControllerState, StateTable
from tilecast_operator.kube.kinds import Key
from tilecast_operator.outcome import AdviceOutcome, AdviceRefusal


def list_changed_keys(before: Mapping[Key, QueuePosition], now: Mapping[Key, QueuePosition]) -> set[Key]:
    """Return the keys of the jobs with a new, a changed or no longer a position."""
    return {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}


class QueuePositions:
    """Position of each job in the newest queue plan. Belongs to one event loop.

    Args:
        records: Records of the jobs. A job's position is forgotten with its record.
        is_on: Whether the queue is planned.
    """

    def __init__(self, records: ControllerState, *, is_on: bool) -> None:
        self.is_on = is_on
        self._positions: StateTable[QueuePosition] = records.add_table()
        self._is_made = False
        self.on_write: Callable[[], None] = lambda: None
        """Function to call after writing a TrainingJob's status, and once the turn of a job in Kueue is known.

        The job may have started, and no watch reports this operator's own writes.
        """
        self._renewed = asyncio.Event()

    def get_position(self, key: Key) -> QueuePosition | None:
        """Return the position of a job in the plan, or None."""
        return self._positions.get(key)

    def find_left_out_reason(self, key: Key) -> str:
        """Return why the plan leaves out a job, or "" if it does not."""
        position = self._positions.get(key)
        return "" if position is None or position.pool else position.reason

    def replace_plan(self, positions: Mapping[Key, QueuePosition]) -> set[Key]:
        """Replace all positions by those of a new plan. Return the keys of the jobs with changed positions."""
        before = dict(self._positions)
        self._positions.clear()
        for key, position in positions.items():
            self._positions[key] = position
        self._is_made = True
        self._renewed.set()
        self._renewed = asyncio.Event()
        return list_changed_keys(before, positions)

    async def wait_until_planned(self, key: Key, limit_s: float) -> None:
        """Wait until the plan contains a job, for at most `limit_s` seconds."""
        if not self.is_on:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while key not in self._positions:
                    await self._renewed.wait()

    def add_position(self, key: Key, status: TrainingJobStatus, before: TrainingJobStatus) -> TrainingJobStatus:
        """Return a status with its job's position in the plan. Before the first plan, use the position in `before`."""
        is_unknown = self.is_on and not self._is_made
        position = before.queue if is_unknown else self._positions.get(key)
        return status if status.queue == position else status.model_copy(update={"queue": position})

    def prefer_planned_pool(self, key: Key, outcome: AdviceOutcome) -> AdviceOutcome:
        """Return the advice outcome of a waiting job, with the pool of the queue plan first."""
        position = self._positions.get(key)
        if isinstance(outcome, AdviceRefusal) or position is None or not position.position:
            return outcome
        return _put_pool_first(outcome, position)


def _put_pool_first(advice: Advice, position: QueuePosition) -> Advice:
    """Return the advice with its best plan on the planned pool first.

    If the advice has no plan on this pool, return the advice unchanged.
    """
    there = [item for item in advice.offers if item.pool.name == position.pool]
    if not there or advice.offers[0] is there[0]:
        return advice
    first = replace(there[0], reason=f"by the plan of the whole queue: {there[0].reason}")
    return replace(advice, offers=(first, *(item for item in advice.offers if item is not there[0])))
