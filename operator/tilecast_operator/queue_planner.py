"""Plan the queue outside the event loop: in a process of its own, or in a thread if there are no search processes.

A plan takes seconds of processor time. In a thread of the operator it would hold up the event loop, which decides about
held jobs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from tilecast_operator.queue_rows import PlannedQueue
from tilecast_operator.report.queue_advice import QueuePlanInputs, QueuePlanResult, plan_queue
from tilecast_operator.search_process import Cause, SearchInterruptedError, SearchLimits, SearchProcess

SECONDS = 120.0
"""Time limit of one plan, in seconds."""
NICENESS = 10
"""Niceness of the process, so that the operator and its searches go first."""

_REMEDIES: Mapping[Cause, str] = {
    "timeout": "serve fewer namespaces with each release (shard.namespaceSelector)",
    "memory": "raise settings.TILECAST_SEARCH_MEMORY_MIB and the memory limit",
}

log = logging.getLogger("tilecast")


class QueuePlanner:
    """Planner of the queue. It makes one plan at a time.

    Args:
        has_process: Whether to plan in a process, under limits of time and memory.
        memory_mib: Limit of the process's private memory in MiB.
        restarted: Function to call, in a thread, with the cause whenever the process was replaced.
    """

    def __init__(self, *, has_process: bool, memory_mib: int, restarted: Callable[[Cause], None]) -> None:
        limits = SearchLimits(SECONDS, memory_mib)
        self._process = SearchProcess(plan_queue, limits, restarted, NICENESS) if has_process else None

    async def plan(self, inputs: QueuePlanInputs, now_s: float) -> QueuePlanResult:
        """Return the queue plan at `now_s`, a Unix time, with the position of each job.

        If planning exceeds a limit, the plan has only this problem, and no job has a position.

        Raises:
            SearchInterruptedError: the process ended for another reason. Another try may succeed.
        """
        if self._process is None:
            return await asyncio.to_thread(plan_queue, inputs, now_s)
        try:
            result: QueuePlanResult = await asyncio.to_thread(self._process.call_function, inputs, now_s)
        except SearchInterruptedError as error:
            if error.cause == "died":
                raise
            problem = f"planning the queue of {len(inputs.state.rows)} jobs {error}; {_REMEDIES[error.cause]}"
            log.warning("%s", problem)
            return QueuePlanResult(PlannedQueue(None, tuple(inputs.state.refused), problem))
        return result

    def resident_bytes(self) -> int:
        """Return the resident memory of the process in bytes, or 0 without a process."""
        return 0 if self._process is None else self._process.resident_bytes

    def stop(self) -> None:
        """Stop the process."""
        if self._process is not None:
            self._process.stop()
