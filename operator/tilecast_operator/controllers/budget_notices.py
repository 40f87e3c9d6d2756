"""Notices in the status of a job whose search waits because its namespace is over its budget of search time."""

from __future__ import annotations

import asyncio
from typing import Final

from tilecast.api import training_job
from tilecast.api.status import Summary, TrainingJobStatus
from tilecast_operator.advisor import Advisor
from tilecast_operator.answer import Answer
from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.kube.cache import Stored
from tilecast_operator.kube.kinds import Key
from tilecast_operator.objects.view import View
from tilecast_operator.question import Question
from tilecast_operator.report import job_status
from tilecast_operator.report.job_status import Aspect

QUEUED: Final = "Queued"


class BudgetNotices:
    """Writer of a notice into each job without an answer whose search waits for those of other namespaces."""

    def __init__(self, context: SharedContext, advisor: Advisor) -> None:
        self._context = context
        self._advisor = advisor

    async def answer_with_notices(
        self, key: Key, seen: Stored[View], question: Question, known: Answer | None
    ) -> tuple[Answer, Stored[View]]:
        """Wait for the answer to a job, and write notices meanwhile; return the answer and the updated job.

        `known` is the answer if there is one already. Raises as `Writer.write_status` does.
        """
        if known is not None:
            return known, seen
        timings = self._context.timings
        again_s = timings.tell_again_s
        while not seen.value.status:
            left_s = max(timings.tell_after_s - self._context.answers.seconds_open(key), again_s)
            try:
                async with asyncio.timeout(left_s):
                    return await self._advisor.answer_question(question), seen
            except TimeoutError:
                seen = await self._write_notice(key, seen)
                again_s = min(2 * again_s, timings.tell_again_most_s)
        return await self._advisor.answer_question(question), seen

    async def _write_notice(self, key: Key, seen: Stored[View]) -> Stored[View]:
        """Write the notice if jobs of other namespaces go first; return the updated job."""
        used_s = self._advisor.behind_others().get(key.namespace)
        if used_s is None or not self._context.leadership.is_leader:
            return seen
        count = self._context.answers.count_open(training_job.KIND, key.namespace)
        text = (
            f"its namespace used {used_s:.0f} s of searches in the last minute, and jobs of others go first; "
            f"{count} of its jobs wait"
        )
        status = make_waiting_status(text, seen.value.generation, self._context.timestamp())
        return await self._context.writer.write_status(key, seen, status.document())


def make_waiting_status(text: str, generation: int, now: str) -> TrainingJobStatus:
    """Return the status of a job that has no answer yet."""
    aspect = Aspect("Unknown", QUEUED, text)
    conditions = [
        job_status.make_condition(kind, aspect, generation, now, ()) for kind in ("Ready", "RecommendationProvided")
    ]
    return TrainingJobStatus(conditions=conditions, summary=Summary.within(reason=QUEUED))
