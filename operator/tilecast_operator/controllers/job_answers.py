"""Questions of TrainingJobs, with what their earlier runs say, and the answers to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tilecast.advice import Advice
from tilecast.api.status import TrainingJobStatus
from tilecast_operator.advisor import Advisor
from tilecast_operator.answer import Answer
from tilecast_operator.controllers.budget_notices import BudgetNotices
from tilecast_operator.controllers.learning import PoolLearnings
from tilecast_operator.controllers.pools import Pools, PoolsChange
from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.kube.cache import Stored
from tilecast_operator.kube.kinds import Document, Key
from tilecast_operator.objects.view import View
from tilecast_operator.question import Question


class JobAnswers:
    """Answers TrainingJobs. Belongs to one event loop."""

    def __init__(self, context: SharedContext, advisor: Advisor, pools: Pools, learning: PoolLearnings) -> None:
        self._advisor = advisor
        self._pools = pools
        self._learning = learning
        self._notices = BudgetNotices(context, advisor)

    @property
    def is_ready(self) -> bool:
        """Whether the pools are known."""
        return self._pools.report is not None

    @property
    def products(self) -> dict[str, str]:
        """The GPU of each pool, by name of the pool."""
        return {} if self._pools.report is None else {one.name: one.gpu.product for one in self._pools.report.pools}

    def listen(self, listener: Callable[[PoolsChange], None]) -> None:
        """Call `listener` whenever answers may change."""
        self._pools.listen(listener)

    async def question(self, key: Key, document: Document, unless: str | None = None) -> Question:
        """Return what a job asks, with what its earlier runs say.

        Runs whose digest is `unless` are not priced.
        """
        question = await self._advisor.question(key.namespace, document)
        return await self._advisor.measured(question, partial(self._learning.runs_of, key.namespace, [key]), unless)

    async def is_answered(self, question: Question, before: TrainingJobStatus) -> bool:
        """Return whether a status contains the answer to a question, by the digest of its inputs."""
        digest = await self._advisor.inputs_hash(question)
        return digest is not None and digest == before.inputs_hash

    async def to(self, question: Question) -> Answer:
        """Return the answer to a question, with notes about the job's own runs."""
        return noted(question, await self._advisor.answer(question))

    async def first(
        self, key: Key, seen: Stored[View], question: Question, known: Answer | None
    ) -> tuple[Answer, Stored[View]]:
        """Return the answer to a job that may have none yet, and the job as it is by then.

        While others go first, a notice says so. `known` is the answer if it is known already.
        """
        return await self._notices.answer(key, seen, question, known)

    async def standing(self, question: Question, answer: Answer, before: TrainingJobStatus) -> Answer:
        """Return the answer with the recommendation of a status kept in front where it is as good."""
        best = before.recommendation
        return answer if best is None else await self._advisor.standing(question, answer, best.incumbent())


def noted(question: Question, answer: Answer) -> Answer:
    """Return the answer with notes about the own runs of the job that asks."""
    return question.own.with_notes(answer) if isinstance(answer, Advice) else answer
